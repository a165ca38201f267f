"""M6xx: binding to a model, reading and writing."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {
    "M601": Message(
        "{name!r} and {other!r} are one parameter of the model, and two rules fill it",
        "The second write would destroy the first.",
        "Drop one of the rules, or say `tie:` where they are meant to be the same.",
    ),
    "M602": Message(
        "{name!r} is on the meta device and has no storage to write to",
        "A mapping of names to tensors is written in place, so its tensors must be real.",
        "Allocate it first (torch.empty_like(..., device='cpu')), or hand over the module.",
    ),
    "M603": Message(
        "the buffer {name!r} is on the meta device, and no checkpoint holds it",
        "A buffer that the module computes for itself is lost when the module is built on meta.",
        "Build only the parameters on meta (mapper.integrations.transformers.on_meta), or compute the buffer again first.",
    ),
    "M604": Message(
        "the runtime {runtime!r} of the spec {spec!r} is for {package} {specifier}, and the model is of {package} {found}",
        "Another version of an engine may name, fuse, pad or order its parameters otherwise, and equal shapes do not show it.",
        "Use a version of the engine that the runtime is for, or a newer spec. Where you know that nothing has changed, "
        "say so in a spec that extends this one, under `versions` of the runtime.",
    ),
    "M610": Message(
        "{name!r} was fed twice in one session",
        "A source that comes twice in one update leaves it open which value counts.",
        "Feed each source once, or start a new session.",
    ),
    "M611": Message(
        "{name!r} has the dtype {dtype}, which no safetensors file can hold",
        "Sources are described by safetensors dtypes.",
        "Feed the tensor in the checkpoint's dtype.",
    ),
    "M612": Message(
        "the session is closed",
        "A session is judged once, at `finish` or when its block ends; what comes later belongs to another update.",
        "Start a new session with `loader.update()`.",
    ),
    "M613": Message(
        "{name!r} holds {value}, which {dtype} cannot hold: {least} to {most}",
        "A cast to fewer bits would wrap the number around and leave another one.",
        "Check the checkpoint; or cast to a wider dtype.",
    ),
    "M650": Message(
        "{path!r} changed since its header was read: expected {expected}, found {found}",
        "Offsets, dtypes and shapes are those of the file as it was; the bytes there now may be of other tensors.",
        "Open the checkpoint again once nothing writes to it.",
    ),
    "M651": Message(
        "{path!r} is a manifest: it has names, dtypes and shapes, and no files to read from",
        "A manifest is enough to check and to plan, not to load.",
        "Open the folder of the checkpoint.",
    ),
    "M652": Message(
        "torch {version} has no dtype for {dtype}",
        "A tensor is handed over in the dtype it is stored in, never cast.",
        "Use a newer torch, or convert the checkpoint.",
    ),
    "M653": Message(
        "an F4 tensor of shape {shape} cannot be cut at {found} along its last dim: two elements share a byte",
        "torch holds F4 elements in pairs along the last dim; half a pair has no address.",
        "Cut the last dim at even places, or another dim.",
    ),
    "M654": Message(
        "{path!r} cannot be read: {reason}",
        "The system refused to open the file, to map it into memory, or to read all of it.",
        "Check permissions and the limit on address space (`ulimit -v`, vm.overcommit_memory).",
    ),
}
