"""M8xx: pinned cases, and what can be found in a spec without a checkpoint."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {
    "M800": Message(
        "missed: {name!r} should {expected}, and {found}",
        "A case pins what happens to a name, and nothing happens to it.",
        "Correct the rule or the skip that should name it; correct the case only where the model itself says so.",
    ),
    "M801": Message(
        "grabbed: {name!r} should be {expected}, and {found}",
        "A case pins that no rule takes a name, and one does.",
        "Narrow the rule or the skip that takes it; correct the case only where the model itself says so.",
    ),
    "M802": Message(
        "misrouted: {name!r} should go to {expected}, and {found}",
        "A case pins where a tensor goes, and the rules send it elsewhere. The lines of a case for one source say all that "
        "the rank does with it; a side without a box is the whole tensor; full axes at the end of a box may be left out.",
        "Correct the rule's parts, dims or shard; correct the case only where the model itself says so.",
    ),
    "M803": Message(
        "there is no config {name!r}",
        "A case or a check names a config.json by the name of a file in `configs`, beside the specs.",
        "Correct the name, add `configs/NAME.json`, or write the keys of the config in place of its name.",
    ),
    "M810": Message(
        "no case of the runtime {runtime!r} pins {parts} of the rule for {rule!r}, which has parts of equal size",
        "Two parts of equal size in the wrong order change no name and no shape, so no structural check sees it. Only bytes, "
        "or a case that pins each part's box, do.",
        "Compare with the module's own forward, then add the case of the hint; it holds what the rule does now.",
    ),
    "M811": Message(
        "the dim {dim!r} of the rule for {rule!r} is cut without `units`, and its size has the factor {factor!r}",
        "Without `units` a cut may fall anywhere, through the middle of a head or group too, wherever the rows divide.",
        "Write the number of heads or groups as `units`, or the dim's own size to insist that a cut may fall between any rows.",
    ),
    "M812": Message(
        "the dim {dim!r} of the rule for {rule!r} is padded by `{key}` without `fill`",
        "What fills the padding of a tensor that is no weight decides results: zero in place of -inf changes no shape.",
        "Write the `fill` that the module uses, `fill: 0` included.",
    ),
    "M813": Message(
        "the rule for {rule!r} cuts {dim!r} and does not say which ranks hold the bias, which the config {config} has",
        "A bias that every rank adds before the sum over ranks counts once per rank.",
        "Add `bias: first` or `bias: all` to the dim's entry in `shard`, as the module's forward needs it.",
    ),
    "M814": Message(
        "no config reaches the rule for {rule!r}",
        "What no known config uses is never checked, here or in any test.",
        "Add a config that uses it to `configs`, correct its `when`, or remove it.",
    ),
    "M815": Message(
        "no config reaches the {kind} {pattern!r}",
        "What no known config uses is never checked, here or in any test.",
        "Add a config that uses it to `configs`, correct its pattern or `when`, or remove it.",
    ),
    "M816": Message(
        "no config names the architectures of the spec {spec!r}, so its rules were not compiled",
        "Index ranges, conditions and sizes have values only with a config; without one only the text is checked.",
        "Add the config.json of a checkpoint as `configs/NAME.json` beside the spec, or pin a case with a config.",
    ),
    "M817": Message(
        "no config meets what the runtime {runtime!r} requires, so its rules were not compiled",
        "Index ranges, conditions and sizes have values only with a config; without one only the text is checked.",
        "Add the config.json of a checkpoint that meets `requires` as `configs/NAME.json` beside the spec.",
    ),
    "M830": Message(
        "the runtime {runtime!r} breaks the guarantee {guarantee!r}: {problem}",
        "The same synthetic load was done by the engine and by a slow reference loader that shares nothing with it.",
        "Read the example below the message; where the spec is right, please report a bug of mapper.",
    ),
    "M831": Message(
        "synthetic loads need {module!r}, which is not installed",
        "They run real tensors of drawn configs and layouts through the engine and the reference loader.",
        "Run `pip install 'mapper-weights[testing]'`, or leave them out with --examples 0.",
    ),
    "M832": Message(
        "nothing finds this change: {mutant}; {difference}",
        "The change alters what is loaded, and no check of the structure and no evidence speaks against it: the same slip of a "
        "hand, or of a merge, would go unseen.",
        "Compare with the module's own code; then add the case of the hint, or evidence recorded from the engine's loader.",
    ),
}
