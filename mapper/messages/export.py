"""M7xx: the way back, from parameters to a checkpoint, and agreement between ranks."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {
    "M701": Message(
        "{name!r} cannot be written back: its values were multiplied by the scales in {scale!r} when they were loaded",
        "Which values and scales a parameter came from cannot be told from their product.",
        "Keep the tensor of the base checkpoint, or load the parameter in its stored format.",
    ),
    "M702": Message(
        "{name!r} cannot be written back as {dtype}: {target!r} holds values that it cannot hold",
        "A cast on the way in is undone only where nothing is lost; nothing is rounded without being asked.",
        "Export from a runtime that keeps the checkpoint's dtype.",
    ),
    "M703": Message(
        "{box} of {name!r} is in none of the parameters given",
        "A checkpoint holds whole tensors; a part of this one lives on other ranks.",
        "Export with the parameters of all ranks of the layout.",
    ),
    "M704": Message(
        "the ranks do not agree on {box} of {name!r}",
        "A replicated element has one value; ranks that differ have diverged.",
        "Find out which rank is right; the parameters must be equal before they are exported.",
    ),
    "M705": Message(
        "{path!r} exists and is not empty",
        "An export never mixes with files that are there already.",
        "Give a new folder.",
    ),
    "M706": Message(
        "{name!r} cannot be written back: {target!r} holds different values where one stored element was repeated",
        "A grid made finer on the way in is undone only where all copies of an element are equal.",
        "Export from a runtime that keeps the checkpoint's grid.",
    ),
    "M707": Message(
        "{name!r} cannot be written back as {dtype}: {target!r} holds it as {found}, which lost digits when it was loaded",
        "What a narrowing cast took away cannot be told from what is left.",
        "Keep the tensor of the base checkpoint, or load the parameter in its stored dtype.",
    ),
    "M708": Message(
        "{name!r} cannot be written back: `{op}` has no inverse, {target!r} holds only its result",
        "What went into a sum over the whole tensor cannot be told from what came out.",
        "Keep the tensor of the base checkpoint.",
    ),
    "M709": Message(
        "{name!r} cannot be written back: {target!r} holds {found} at {box}, and `{op}` makes that of no one value of {dtype}",
        "An operation on values is undone only where exactly one stored value gives what the parameter holds; rounding "
        "makes several values equal, and training makes others.",
        "Keep the tensor of the base checkpoint, or store it in a wider dtype.",
    ),
    "M710": Message(
        "rank {rank} has another {what} than rank 0: {found} and {expected}",
        "Ranks that plan from different inputs would fill one model from two worlds.",
        "Start all ranks with the same spec, config, layout, options and checkpoint.",
    ),
    "M711": Message(
        "rank {rank} cannot load: {message}",
        "No rank writes before all ranks know that they can.",
        "Fix what that rank reports.",
    ),
    "M712": Message(
        "two copies of {name!r}{box} differ",
        "A replicated element has one value; ranks, or slots of one rank, that differ have diverged.",
        "Find out which copy is right, and load the other again.",
    ),
    "M713": Message(
        "{name!r}{box} is on none of the ranks whose digests are combined",
        "The checksum of a tensor adds up from all of its parts.",
        "Combine the digests of all ranks of one layout.",
    ),
    "M714": Message(
        "there is nothing yet to digest: nothing was loaded through this loader",
        "Which tensors the parameters stand for is known from the headers of what was loaded.",
        "Load or update the whole model first, or give the checkpoint (a manifest will do).",
    ),
}
