"""M75x: mapper inside a serving engine."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {
    "M751": Message(
        "model_loader_extra_config: {problem}",
        "The settings of `--load-format mapper` are spec, options, overlay, fallback and report.",
        "Correct the JSON that --model-loader-extra-config is given.",
    ),
    "M752": Message(
        "{what} would be left to vLLM's own loader, and `fallback` is false: {reason}",
        "What vLLM's own loader writes is not proved.",
        "Allow it with `fallback: true`, or give a spec that covers the model.",
    ),
    "M753": Message(
        "mapper does not know how vLLM lays a model out with {what}",
        "A layout here is tp, pp, dp and expert parallelism; other kinds of parallelism cut parameters in other ways.",
        "Load with vLLM's own loader (`--load-format auto`), or leave that kind of parallelism out.",
    ),
    "M754": Message(
        "{name!r} is not as it was after the load: {what}",
        "Something has replaced or reshaped the parameter; an update of what it was would have no effect on the engine.",
        "Start the engine anew, or update it with vLLM's own reload_weights.",
    ),
    "M755": Message(
        "this model cannot be updated while it runs: {reason}",
        "An update must leave the engine as if it had been started on the new weights, or not begin.",
        "Start the engine anew on the new checkpoint.",
    ),
    "M756": Message(
        "the weights of this model are incomplete: {count} sources are missing, the first is {name!r}",
        "A model that is used half loaded computes with memory that nobody has written.",
        "Feed what is missing, or drop the model.",
    ),
    "M757": Message(
        "no update is open",
        "Tensors belong to an update, which begins, is fed, and is finished or aborted.",
        "Call begin_update first.",
    ),
    "M758": Message(
        "an update is open already",
        "Two updates of one model at once would mix their values.",
        "Finish the open update, or abort it.",
    ),
    "M759": Message(
        "vLLM could not put new weights in place in {name}: {problem}",
        "Its layerwise reload has failed half way, with some layers made anew and others not; the model serves no more.",
        "Start the engine anew. Where it happens again, vLLM's kernels for this layer cannot be loaded twice.",
    ),
}
