"""M1xx: the text of a spec, its schema, its scalars, and where specs are found."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {
    "M101": Message(
        "not YAML: {problem}",
        "The YAML parser stops at the first place it cannot read.",
        "Look at the caret and the line above it: most often an indent, a missing colon or an open quote or bracket.",
    ),
    "M102": Message(
        "the key {key!r} is given twice",
        "Most YAML readers keep the last of two equal keys and lose the first without a word.",
        "Merge the two values under one key, or remove one.",
    ),
    "M103": Message(
        "'{mark}{name}': anchors and aliases are not part of the language",
        "A reader of a rule must see all of it in one place; an alias can also make a small file huge.",
        "Use a block (`blocks:` and `use:`) for rules that repeat, `let` for expressions.",
    ),
    "M104": Message(
        "the tag {tag!r} is not part of the language",
        "Every value has the type that it is written with.",
        "Remove the tag; quote the value if it is to be text.",
    ),
    "M105": Message(
        "the merge key '<<' is not part of the language",
        "YAML 1.2 has no merge keys, and what a merge overrides is not visible.",
        "Use a block (`blocks:` and `use:`), or `extends` for a whole spec.",
    ),
    "M106": Message(
        "a key is a text, found {found}",
        "Numbers, null, true and lists as keys are equal to other spellings of themselves.",
        "Quote the key.",
    ),
    "M107": Message(
        "a tab; indent and separate with spaces",
        "YAML forbids tabs as indentation, and its readers disagree about tabs elsewhere.",
        "Write spaces; inside double quotes write \\t.",
    ),
    "M108": Message(
        "a second document starts here",
        "A file holds one spec; what stands behind '---' would be lost.",
        "Move it into a file of its own.",
    ),
    "M109": Message(
        "the file is empty",
        "A spec has at least the keys `spec`, `id`, `title`, `version` and `architectures`.",
        "Start from `mapper new`, or from a bundled spec.",
    ),
    "M110": Message(
        "cannot read {file}: {reason}",
        "The file does not exist, is a folder, or may not be read.",
        "Check the path; a bundled spec is named without `.yaml`.",
    ),
    "M111": Message(
        "byte 0x{byte:02x} is not UTF-8",
        "Specs are UTF-8 text.",
        "Save the file as UTF-8.",
    ),
    "M112": Message(
        "a spec is a mapping of keys to values, found {found}",
        "The top level of the file has to be `key: value` lines.",
        "Start the file with `spec: 1`.",
    ),
    "M113": Message(
        "nested deeper than {limit} levels",
        "No spec needs that; a file that does is damaged or hostile.",
        "Close the brackets.",
    ),
    "M120": Message(
        "unknown key {key!r} in {where}",
        "A key that nobody reads is a typing error or a misunderstanding, and would have no effect.",
        "Correct the key, or remove it.",
    ),
    "M121": Message(
        "{where} needs {key}",
        "The key has no default.",
        "Add the key.",
    ),
    "M122": Message(
        "expected {expected}, found {found}",
        "The value has another type than its key asks for.",
        "Write the value as expected; a text that looks like a number, null or true needs quotes.",
    ),
    "M123": Message(
        "expected {expected}, found {found}",
        "The key takes one of a closed set of values.",
        "Write one of them.",
    ),
    "M124": Message(
        "{word!r} is a text here; write {instead}",
        "Under YAML 1.2 `yes`, `no`, `on`, `off` are texts, and `none`, `None` have no meaning in YAML. A text is always "
        "true, so the mistake would pass unseen.",
        "Write true, false or null.",
    ),
    "M125": Message(
        "expected {expected}, found {found!r}",
        "Names are made of letters, digits and '_', so that expressions and patterns can refer to them.",
        "Rename it.",
    ),
    "M126": Message(
        "{where} has {found}, expected {expected}",
        "An empty list or mapping says nothing, and a pair has two.",
        "Add what is missing, or remove the key.",
    ),
    "M127": Message(
        "{keys} exclude each other in {where}",
        "They are two ways to say one thing.",
        "Keep one of them.",
    ),
    "M128": Message(
        "language version {found}; this mapper reads version 1",
        "The file is written in another version of the language than this mapper knows.",
        "Write `spec: 1`, or install the mapper that the spec was written for.",
    ),
    "M130": Message(
        "{problem}",
        "Expressions have literals, null, names, [], arithmetic, comparison, in, and or not, if else, and the functions "
        "ceil_div, gcd, min, max, len and count.",
        "Rewrite the expression at the caret; a long one becomes clear as two `let`s.",
    ),
    "M131": Message(
        "in the pattern {text!r}: {problem}",
        "A pattern is dotted segments of text and placeholders such as {{layer}}.",
        "Correct the pattern at the caret.",
    ),
    "M132": Message(
        "{text!r} has a wildcard; '*' and '**' stand in skip and keep only",
        "A rule must say which tensors it reads, so that nothing is loaded by accident.",
        "Name an index: {{layer}} in place of '*'.",
    ),
    "M133": Message(
        "{text!r} is no axis; expected `dim`, `dim / EXPR` or an integer",
        "An axis of a leaf is a dim, a dim by blocks, or a fixed number of elements.",
        "Write for example `[out, in / 32, 16]`.",
    ),
    "M134": Message(
        "{text!r} is no order of dims; expected `(outer inner)`",
        "`stored` says over which dims the axis on disk runs, the outermost first.",
        "Write for example `{{out: (expert out)}}`.",
    ),
    "M135": Message(
        "{text!r} is no tensor name with a box; expected `name` or `name[0:4, 2]`",
        "A case pins a tensor, or a box of it with one range an axis.",
        "Correct the brackets.",
    ),
    "M136": Message(
        "{text!r} is no range; expected `start:stop` with start < stop, or one integer",
        "A box has one range an axis; ranges count from 0 and end before `stop`.",
        "Write for example `[9, 0:2048]`.",
    ),
    "M137": Message(
        "{text!r} is no view; expected `AXES -> AXES`, each axis a dim or its factors in parentheses",
        "A view names the factors of each axis in the order of the sources, then in the order of the target.",
        "Write for example `(head part width) in -> (part head width) in`.",
    ),
    "M138": Message(
        "in the operation of {step!r}: {problem}",
        "The operations of a finalize step are small formulas over whole tensors; each is read before any tensor is there.",
        "Correct the operation; docs/language.md lists them.",
    ),
    "M140": Message(
        "there is no bundled spec or architecture named {name!r}",
        "A spec is found by its id, by an architecture it names, or by a path that ends in `.yaml`.",
        "Correct the name, or give a path.",
    ),
    "M142": Message(
        "the parent {name!r} is neither in {folder} nor bundled",
        "`extends` names the id of a spec beside this one, or of a bundled one.",
        "Correct the id, or put the parent beside this file.",
    ),
    "M143": Message(
        "specs extend each other in a circle: {chain}",
        "A spec is merged over its parent, which must be complete without it.",
        "Remove one `extends`.",
    ),
    "M144": Message(
        "nothing inherited here has the id {id!r}",
        "`drop` removes items that the parent's list at the same place holds, by id.",
        "Correct the id, or give the parent's item one.",
    ),
    "M145": Message(
        "the architecture {name!r} is named by more than one bundled spec: {ids}",
        "An architecture picks one spec.",
        "Load one of them by id.",
    ),
}
