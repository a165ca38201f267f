"""M5xx: a program against a checkpoint's headers."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {
    "M501": Message(
        "the checkpoint has no tensor {name!r}, which the rule for {rule!r} needs",
        "Every element of every parameter must come from a source; without this tensor a part would stay random.",
        "Complete the checkpoint, correct the rule's source, or mark the rule `optional: true` where the model can do without.",
    ),
    "M502": Message(
        "no rule names the checkpoint's tensor {name!r}",
        "A tensor that nothing uses is a weight that would be lost without a word.",
        "Add a rule for it, or a `skip` with a `why`; for one run use --skip PATTERN --why TEXT.",
    ),
    "M503": Message(
        "{name!r} has the shape {found}, expected {expected} ({dims})",
        "The rule computes each dim from the config; another shape would be cut in the wrong places.",
        "Check that the config belongs to this checkpoint, then the rule's `dims`.",
    ),
    "M504": Message(
        "{name!r} has the dtype {found}, expected {expected}",
        "The format of the rule says how the bytes are read.",
        "Check quantization_config in the config, then the format's `dtype`.",
    ),
    "M505": Message(
        "{name!r} has the dtype {found}, and the rule computes with its values (`{op}`)",
        "Values are computed in float32 and kept in their dtype, which has to be float16, bfloat16, float32 or float64.",
        "Add `cast` to the rule, or check the checkpoint.",
    ),
    "M506": Message(
        "the checkpoint has {name!r}, but {problem}",
        "A bias that every rank adds before the sum over ranks counts once per rank.",
        "Add `bias: first` or `bias: all` to the dim's entry in `shard`, as the model's forward needs it.",
    ),
    "M507": Message(
        "{name!r} has the dtype {found}, and another source of the same target has {other}",
        "One parameter has one dtype, and nothing is converted without being asked.",
        "Check the checkpoint; one of the parts was saved differently.",
    ),
    "M508": Message(
        "{name!r} is tied to {twin!r}, which is not on rank {rank}",
        "A tied parameter shares the storage of its twin, so both live on the same ranks.",
        "Give the twin's rule a `stage` that holds both, such as `stage: both`.",
    ),
    "M509": Message(
        "{name!r} is read by a rule marked `reuse`, and by no other",
        "A second reader does not make a tensor known: the rule that owns it is missing.",
        "Add the owning rule, or drop `reuse`.",
    ),
    "M510": Message(
        "{said} is {expected}, and the checkpoint has {found}",
        "Where the config and the checkpoint disagree on how many layers, drafts or experts there are, one of them is wrong.",
        "Correct the config, or use a checkpoint that has what it says; an option of the spec may say which to believe.",
    ),
    "M511": Message(
        "{name!r} is skipped as a copy of {original!r}, and {problem}",
        "The config ties the two, so only one of them is loaded; where they differ, a weight would be lost without a word.",
        "Correct the config where the model is not tied (tie_word_embeddings: false); to load without the copy, give a skip of "
        "your own: --skip NAME --why TEXT.",
    ),
    "M512": Message(
        "{name!r} has the dtype {found}: elements on disk for one of the target are {packed}, of {bits} bits in all, and the "
        "bitcast is to {dtype}, of {expected}",
        "A bitcast keeps all bits. Several elements become one where the format's `stored` has a finer last axis than `dims`.",
        "Check the checkpoint, then the format's `bitcast`, `dims` and `stored`.",
    ),
    "M520": Message(
        "{box} of {target} (shape {shape} on rank {rank}) is written by no source",
        "Coverage is decided by region: what is not written would stay random.",
        "Correct the rule's parts, dims or shard.",
    ),
    "M521": Message(
        "{box} of {target} (shape {shape} on rank {rank}) is written twice",
        "Two sources for one element leave the result to chance.",
        "Correct the rule's parts, dims or shard.",
    ),
    "M522": Message(
        "{box} lies outside of {target} (shape {shape} on rank {rank})",
        "A box must lie in the parameter that it is written to.",
        "Correct the rule's parts, dims or shard.",
    ),
    "M523": Message(
        "slot {slot} of {target} on rank {rank} belongs to {index} {value}, for which the rule has no source",
        "Every slot of a stacked parameter needs its source.",
        "Correct the rule's `when`, or the range of the index.",
    ),
    "M524": Message(
        "the checkpoint has a part that is appended to {name!r} and none for the slots before it, of the rule for {first!r}",
        "Slots that are appended follow those of the rules before; without these the parameter would begin with random values.",
        "Complete the checkpoint, or remove the appended part from it.",
    ),
    "M530": Message(
        "the model has the parameter {name!r} {shape}, which no rule fills and no `keep` names",
        "A parameter without a source would stay random.",
        "Add a rule that fills it, or a `keep` with a `why`.",
    ),
    "M531": Message(
        "the rule for {rule!r} fills {name!r}, which the model does not have",
        "The tensor would be read for nothing, and what it was meant for would stay random.",
        "Check the runtime, the options and the layout; then the rule's target.",
    ),
    "M532": Message(
        "{name!r} has the shape {found} in the model, and the rule gives {expected}",
        "A shape that differs means another layout, another padding or a wrong cut.",
        "Check the layout and the options; then the rule's `dims` and `shard`.",
    ),
    "M533": Message(
        "{name!r} has the dtype {found} in the model, and its source gives {expected}",
        "Nothing is converted without being asked: a narrowing copy loses digits, a bit pattern read as a value is garbage.",
        "Build the model with the checkpoint's dtype, or add `cast` to the rule.",
    ),
    "M534": Message(
        "the model's targets are given for {found} ranks, and the layout has {expected}",
        "Each rank is proved against its own parameters.",
        "Give one object for all ranks, or a list with one for each.",
    ),
    "M535": Message(
        "{box} of the source {name} is read by no rank",
        "A source of which a part is dropped on all ranks is only half loaded.",
        "Correct the rule's `shard`: a size that does not divide loses its tail.",
    ),
    "M536": Message(
        "{target} is held by no rank for {index} in {lost}",
        "Every layer and every expert lives on at least one rank.",
        "Correct the index's range or axis, or the rule's `stage`.",
    ),
    "M537": Message(
        "{target} is held by no rank, though the checkpoint has its sources",
        "A source that a rule claims and that no rank loads is lost without a word.",
        "Correct the rule's `stage`, or the axis of its index.",
    ),
}
