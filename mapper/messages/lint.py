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
}
