"""M2xx: the meaning of a spec, before any config is known."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {
    "M201": Message(
        "unknown name {name!r}",
        "Expressions and placeholders know config keys, options, lets, indices, mesh axes, and quant_method, block_out, "
        "block_in, group_size and weight_bits.",
        "Correct the name, or declare it under `config`, `options`, `let` or `index`.",
    ),
    "M202": Message(
        "unknown function {name!r}",
        "Calls go to ceil_div, gcd, min, max, len, count, or to a `let` with a parameter.",
        "Correct the name, or define `{{name}}(parameter): EXPR` under `let`.",
    ),
    "M203": Message(
        "{name!r} {problem}",
        "A `let` with a parameter is used with an argument, one without is not.",
        "Add or remove the argument, or the parameter in the definition.",
    ),
    "M204": Message(
        "{name!r} is {first} and also {second}",
        "One name has one meaning, so that an expression reads the same everywhere.",
        "Rename one of the two.",
    ),
    "M205": Message(
        "unknown mesh preset {name!r}",
        "A runtime's `mesh` starts from a preset.",
        "Use one of the known presets, and add axes with `{{like: PRESET, AXIS: EXPR}}`.",
    ),
    "M206": Message(
        "definitions refer to each other in a circle: {chain}",
        "None of them has a value.",
        "Break the circle.",
    ),
    "M207": Message(
        "unknown index {name!r}",
        "`stack` names an index.",
        "Correct the name, or declare it under `index`.",
    ),
    "M208": Message(
        "unknown format {name!r}",
        "A format is declared under `formats` of the spec or the runtime, or built in.",
        "Correct the name, or declare the format.",
    ),
    "M209": Message(
        "unknown block {name!r}",
        "`use` takes in a list of rules from `blocks`.",
        "Correct the name, or add the block.",
    ),
    "M210": Message(
        "unknown axis {name!r}",
        "Dims and indices are cut over tp, pp, dp, ep and the axes of the runtime's mesh.",
        "Correct the name, or add the axis to `mesh`.",
    ),
    "M211": Message(
        "unknown dim {dim!r} in `{key}`",
        "`shard`, `stored`, `stack` and `append` name dims of the rule's `dims` or of its format's leaves.",
        "Correct the name, or give the dim under `dims`.",
    ),
    "M212": Message(
        "{name!r} is a word of the language and cannot be {kind}",
        "Dtype and stage words, constants and functions mean the same in every expression, and `parts` in every leaf.",
        "Rename it.",
    ),
    "M213": Message(
        "{side} has {{leaf}}, {other} has not",
        "With {{leaf}} a rule maps every leaf of its format, on both sides; without it, one tensor.",
        "Write {{leaf}} on both sides, or on none.",
    ),
    "M214": Message(
        "the index {index!r} is stacked, but stands in no source",
        "`stack` lays the tensors of all values of an index together, so the sources run over it.",
        "Put {{index}} into the source's name, or remove `stack`; a dim that is on disk already needs none.",
    ),
    "M215": Message(
        "the index {index!r} stands in the source, but neither in the target nor in `stack`",
        "All its tensors would be written to one place.",
        "Put the index into the target's name, or stack it.",
    ),
    "M216": Message(
        "dims {first!r} and {second!r} both have parts",
        "Sources and targets are laid end to end along one dim.",
        "Keep the list of sizes on one dim.",
    ),
    "M217": Message(
        "{count} {what}, but {parts}",
        "A dim with a list of sizes has parts. Sources, targets, units and axes come one a part, or one for all.",
        "Give the dim one size a part: `dims: {{out: [q_size, kv_size, kv_size]}}`.",
    ),
    "M218": Message(
        "the formats {first!r} and {second!r} of one rule never have the same target leaves: {first_leaves} and "
        "{second_leaves}",
        "The sources of a rule end in the same parameters.",
        "Choose formats with equal target leaves, or write two rules.",
    ),
    "M219": Message(
        "the block {name!r} uses itself: {chain}",
        "A block's rules stand in place of `use`; one that uses itself has no end.",
        "Remove one `use`.",
    ),
    "M220": Message(
        "the id {id!r} is given twice in one list",
        "An id picks one item for `drop`, for a replacement and in reports.",
        "Rename one of the two.",
    ),
    "M221": Message(
        "the case is about an unknown runtime {name!r}",
        "A case pins what one of the spec's runtimes does.",
        "Correct the name.",
    ),
    "M222": Message(
        "the case sets an unknown option {name!r}",
        "Options are declared under `options`.",
        "Correct the name, or declare the option.",
    ),
    "M223": Message(
        "the axis {name!r} is almost the key {key!r}",
        "Under `mesh` every other key is one more axis, so a misspelt key would pass as one.",
        "Correct the key, or choose another name for the axis.",
    ),
    "M226": Message(
        "the count of {index!r} names {source!r}, which does not have that index and no other",
        "A count looks for tensors of each value of its index.",
        "Name the tensors of one value, such as `mtp.{{draft}}.**`.",
    ),
    "M225": Message(
        "the versions of {package!r} are {text!r}, which is no PEP 440 specifier",
        "A runtime says which versions of its engine it describes, and the version found is compared with it.",
        "Write comparisons joined by commas, in quotes: '>=0.32,<0.34'.",
    ),
    "M224": Message(
        "the index {index!r} is stacked, and stands in the target too",
        "A stacked index becomes an axis or lies along a dim; it has no name of its own in the module.",
        "Remove it from the target's name, or remove `stack`.",
    ),
    "M227": Message(
        "in the view {formula!r}: {problem}",
        "A view has one axis for each dim of the rule, in their order, and each axis keeps its factors; a dim as a whole "
        "stands by its name. `repeat` may have further factors on the right.",
        "Correct the formula. Dims in another order are a format's `stored`, not a view.",
    ),
    "M228": Message(
        "`{op}`: {problem}",
        "An operation says what it is done to; what it cannot be done to is an error, not nothing.",
        "Correct the operation, or the rule around it.",
    ),
}
