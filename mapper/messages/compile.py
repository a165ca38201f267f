"""M3xx: config, options, layout and the compiled program."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {
    "M301": Message(
        "the config has no key {key!r}, which the spec {spec!r} requires",
        "Sizes, index ranges and conditions of the rules are computed from the config; a guess would load garbage.",
        "Use the checkpoint's own config.json, or pass the missing key.",
    ),
    "M302": Message(
        "the runtime {runtime!r} requires `{that}`: {why}",
        "A runtime states what must hold for its rules to be right.",
        "Use another runtime of the spec, or another checkpoint or layout.",
    ),
    "M303": Message(
        "{problem}",
        "An expression of the spec could not be computed from this config, these options and this layout.",
        "Correct the expression, or the config value that it reads.",
    ),
    "M304": Message(
        "{what} is {found!r}, expected {expected}",
        "A value in the spec must have this kind for the rule to make sense.",
        "Correct the expression.",
    ),
    "M305": Message(
        "the spec {spec!r} has no runtime {runtime!r}; it has {known}",
        "A runtime names whose module layout the rules describe.",
        "Choose one of the runtimes listed.",
    ),
    "M306": Message(
        "the spec {spec!r} has no option {option!r}; it has {known}",
        "Options state facts that no config holds, such as a kernel's padding.",
        "Choose one of the options listed, or leave it out.",
    ),
    "M307": Message(
        "this config names the architecture {found}, and the spec {spec!r} is for {known}",
        "A spec for another architecture can match by accident and load wrong values.",
        "Choose the spec of this architecture, or add the architecture to the spec after checking it.",
    ),
    "M308": Message(
        "the config says {key}: {root!r} at the root, and {inner!r} in text_config",
        "Which of the two the model was built with cannot be told from here; a guess would load another model.",
        "Correct the config, or say in the spec which counts, as in `KEY: {{path: text_config.KEY}}`.",
    ),
    "M310": Message(
        "`{feature}` is part of the language, but this version of mapper does not execute it yet",
        "The whole language is read and checked; what is not executed is refused instead of being ignored.",
        "Remove it, or turn off the option that makes the rule apply.",
    ),
    "M311": Message(
        "two rules map the source {name!r}",
        "Each source tensor is matched by one rule, so that no order of rules decides where it goes.",
        "Narrow one of the patterns, give the rules `when`s that exclude each other, or mark the second with `reuse: true`.",
    ),
    "M312": Message(
        "two rules write the target {name!r}",
        "Each parameter is described by one rule, so that coverage can be proved.",
        "Narrow one of the patterns, or give the rules `when`s that exclude each other.",
    ),
    "M313": Message(
        "a skip also matches {name!r}, which a rule loads",
        "A skip that is too wide hides tensors that should be loaded.",
        "Narrow the skip to the tensors that are not wanted.",
    ),
    "M314": Message(
        "a keep also matches the target {name!r}, which a rule writes",
        "A kept parameter is never written, except by an optional rule whose sources are there.",
        "Narrow the keep, or remove the rule.",
    ),
    "M315": Message(
        "{problem}",
        "A pattern's placeholders must spell one name per index value.",
        "Correct the placeholder.",
    ),
    "M316": Message(
        "{problem}",
        "A rule's dims, parts and sources must fit together.",
        "Correct the rule.",
    ),
    "M317": Message(
        "the rule for {rule!r} has one side inside the prefix {prefix!r} and one side outside",
        "A program scoped to a prefix sees only names below it, on both sides.",
        "Scope to a longer or shorter prefix, or load with the whole program.",
    ),
    "M318": Message(
        "the prefix {prefix!r} spells a value of {index!r}, which is dealt over the axis {axis!r}",
        "Below one layer or one expert, which ranks hold it can no longer be told.",
        "Scope to a shorter prefix.",
    ),
    "M320": Message(
        "the layout's {axis} is {size!r}, expected a whole number of at least 1",
        "Axis sizes count ranks.",
        "Correct the layout.",
    ),
    "M321": Message(
        "the layout's ep is {ep}, expected 1 or tp * dp = {tp} * {dp} = {product}",
        "Experts are spread over all tensor and data parallel ranks of a stage, or over none.",
        "Use one of the two sizes.",
    ),
    "M322": Message(
        "pp_layers is {listed}, expected one number of layers for each of the {pp} stages",
        "The list says how many layers each pipeline stage holds.",
        "Give as many numbers as there are stages.",
    ),
    "M323": Message(
        "pp_layers {listed} adds up to {total}, expected the model's {expected} layers",
        "Every layer lives on exactly one pipeline stage.",
        "Correct the list.",
    ),
    "M324": Message(
        "in the layout {text!r}: unknown key {key!r}; known are {known}",
        "A layout is a list of key=value.",
        "Correct the key.",
    ),
    "M325": Message(
        "in the layout {text!r}: {key} is {value!r}, expected a whole number",
        "A layout is a list of key=value.",
        "Correct the value; lists are written with `+`, as in pp_layers=31+30.",
    ),
    "M326": Message(
        "in the layout {text!r}: {key} is given twice",
        "A layout is a list of key=value.",
        "Remove one of the two.",
    ),
    "M327": Message(
        "rank {rank} does not exist in the layout {layout}, which has ranks 0 to {last}",
        "Ranks count tp fastest, then pp, then dp.",
        "Use a rank of the layout.",
    ),
    "M328": Message(
        "the runtime {runtime!r} has no parallel axes, and the layout is {layout}",
        "Its modules hold whole tensors on every rank.",
        "Use a layout of one rank, or a runtime whose mesh has parallel axes.",
    ),
    "M329": Message(
        "the dim {dim!r} of {target} has {units} units, which {axis}={size} does not divide",
        "A rank holds whole units (heads, groups, rows); a cut through one would compute nonsense.",
        "Use one of the sizes that work; the hint names them.",
    ),
    "M330": Message(
        "the dim {dim!r} of {target} is cut by {axis}={size} into {rows} elements, "
        "which is not a whole number of blocks of {block}",
        "A quantisation block has one scale; a cut through it would leave a rank with a scale for half a block.",
        "Use one of the sizes that work; the hint names them.",
    ),
    "M331": Message(
        "the dim {dim!r} of {target} has an inner part of {rows} elements, which ends inside a block of {block}",
        "Parts that are laid end to end share one grid of blocks; a part that ends inside a block has no place in it.",
        "The parts cannot be fused in this format; no layout works for this config.",
    ),
    "M332": Message(
        "the layout asks for {asked} redundant experts, and the runtime {runtime!r} has {given}",
        "What a layout asks for and does not get changes which slots exist; a silent fallback would load the wrong layout.",
        "Ask for {given}, or use a runtime that has redundant experts.",
    ),
    "M333": Message(
        "the layout asks for placement {asked}, which the runtime {runtime!r} does not have for this config",
        "Placement decides which rank holds which expert; the engine would silently fall back to linear.",
        "Use linear placement.",
    ),
    "M334": Message(
        "{slots} physical expert slots cannot be shared equally by ep={ep} ranks",
        "With redundant experts, every rank has equally many slots.",
        "Choose a number of redundant experts so that the slots divide.",
    ),
    "M335": Message(
        "the placement table has {slots} slots, expected {expected} ({experts} experts and {redundant} redundant)",
        "The table names the logical expert of each physical slot.",
        "Correct the table, or redundant_experts.",
    ),
    "M336": Message(
        "the placement table {problem}; experts are 0 to {last}",
        "Every expert needs at least one slot, and only experts of the model have one.",
        "Correct the table.",
    ),
    "M337": Message(
        "the quantisation config leaves out {excluded!r} and not {kept!r}, which one parameter holds",
        "One parameter has one format; its parts are quantised together or not at all.",
        "Name all of them in the list, or none.",
    ),
    "M338": Message(
        "`{key}` of the quantisation config has the entry {entry!r}: {problem}",
        "An entry is a module's name, a name with `*`, or `re:` and a regular expression.",
        "Correct the entry in the config.",
    ),
    "M340": Message(
        "in the view {formula!r} of {dim!r}: {problem}",
        "The sizes of a view's factors multiply to the size of the dim, or of the part that they are for; one factor may be "
        "left out and follows.",
        "Correct the sizes given with the view, or the rule's `dims`.",
    ),
    "M341": Message(
        "the dim {dim!r} of {target} is interleaved from its parts in blocks of {block} elements, and {problem}",
        "A rank's share of interleaved parts is whole blocks, each with its elements of every part.",
        "Cut the dim with `joined: true` and units of whole blocks, without padding.",
    ),
    "M342": Message(
        "`{op}`: {problem}",
        "An operation on values computes with numbers of the target's dtype, for one source at a time.",
        "Correct the operation, or add `cast`.",
    ),
    "M350": Message(
        "the step {step!r} reads {name!r}, which no rule and no step of this runtime writes",
        "A step derives its output from targets that are loaded, or from the output of another step.",
        "Correct the name, or give the step a `when` where the target does not always exist.",
    ),
    "M351": Message(
        "two steps write {name!r}",
        "Which of the two counted would depend on their order.",
        "Give every index value an output of its own, or drop one of the steps.",
    ),
    "M352": Message(
        "the step {step!r} writes {name!r}, which a rule loads",
        "What a step derives would destroy what was loaded, and the next load would destroy what was derived.",
        "Give the output another name, or load the source into an input of the step.",
    ),
    "M353": Message(
        "steps wait for each other in a circle: {chain}",
        "A step runs when its inputs are complete; in a circle none ever is.",
        "Take one of the inputs away.",
    ),
    "M354": Message(
        "the step {step!r} reads from {inside} and writes {outside}, and the program is cut to {prefix!r}",
        "A program for one part of a model has only the steps that lie in that part.",
        "Cut the program higher up.",
    ),
}
