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
    "M614": Message(
        "{name!r} was left incomplete by another update",
        "An update that was aborted, or has not ended, has written a part of it: it holds values of two versions.",
        "Include it in the scope of one update that writes all of it, or load the model again.",
    ),
    "M615": Message(
        "{name!r} is outside of the scope of the update: {scope}",
        "What an update may write is declared when it starts; anything else would go unnoticed.",
        "Widen the scope, or feed the tensor in an update of its own.",
    ),
    "M616": Message(
        "{scope!r} is no scope: {problem}",
        "A scope is `all`, a list of modules or parameters, or a set or mapping of source names.",
        "Spell modules as the model does, without the checkpoint's prefixes; sources go into a set or mapping.",
    ),
    "M617": Message(
        "{name!r} is of the version {version!r}, and the update of {expected!r}",
        "A tensor of another version would mix two models.",
        "Drop it, or start an update of its version.",
    ),
    "M618": Message(
        "{name!r} waits for the tensor it belongs with",
        "Values and scales are written together; one half alone changes nothing.",
        "Feed the other half in this update too; `loader.groups()` lists the pairs.",
    ),
    "M619": Message(
        "{name!r} cannot be taken as a delta: {problem}",
        "A delta leaves elements as they are, which must then be known to be right.",
        "Feed the whole tensor; `loader.finalize()` says that all targets were filled elsewhere.",
    ),
    "M620": Message(
        "{name!r} would be held until the tensor it belongs with comes: {size:,} bytes beside {held:,}, the limit is "
        "{limit:,}; {waiting} wait as well",
        "Tensors that need another are kept in memory, and that memory is bounded.",
        "Send pairs close together (`loader.groups()`), or raise max_held_bytes.",
    ),
    "M621": Message(
        "the scope has {name!r} and not {partner!r}, which it is read with",
        "Values and scales are written together.",
        "Send both; `loader.groups()` lists the pairs.",
    ),
    "M623": Message(
        "{name!r} has the digest {found:016x}, expected {expected:016x}",
        "The tensor is not the one that its sender has.",
        "Send it again; nothing of it has been written.",
    ),
    "M624": Message(
        "{name!r} was consumed by the step {step!r}: nothing can be loaded into it",
        "The step turned it into something else, in place, when it ran.",
        "Build the model anew, or give the step a `restore` function and update with staged=True.",
    ),
    "M630": Message(
        "the step {step!r} calls {name!r}: {problem}",
        "What a spec cannot say in formulas is a function of the engine's, found before anything is loaded.",
        "Register it with `mapper.finalize.register` before the loader is made, or write `package.module:function`.",
    ),
    "M631": Message(
        "the step {step!r} cannot derive {output!r}: {problem}",
        "The operations of a step are written for tensors of certain shapes.",
        "Compare the step's formula with the shapes of its inputs on this rank.",
    ),
    "M632": Message(
        "{output!r} is derived after the load, and the mapping of tensors that is filled cannot take it",
        "What a step derives becomes an entry of the mapping.",
        "Hand over a dict, or the module.",
    ),
    "M633": Message(
        "the step {step!r} needs {name!r}, which is not complete",
        "A step that ran on half a tensor would leave values that belong to no checkpoint.",
        "Load it, or include it in the scope of the update; `loader.finalize()` says that all targets were filled elsewhere.",
    ),
    "M634": Message(
        "the step {step!r} needs {name!r}, which the model does not have",
        "The program fills it, so the model was built for something else.",
        "Compare the model with `mapper targets`.",
    ),
    "M635": Message(
        "the step {step!r} would change {output!r}: expected {expected}, found {found}",
        "A derived tensor is written in place, since captured graphs and kernels keep its address.",
        "Build the model anew, or derive the tensor in one form.",
    ),
    "M636": Message(
        "the step {step!r} writes into the module {module!r}, which the model does not have",
        "A derived tensor is an attribute of the module it belongs to.",
        "Correct the step's output, or compare the model with the spec.",
    ),
    "M637": Message(
        "{name!r} is no target of this rank",
        "What changed is named by the parameters that rules fill here.",
        "Correct the name; `mapper targets` lists them.",
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
