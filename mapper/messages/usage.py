"""M9xx: how the command line and the library are called."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {
    "M901": Message(
        "unknown command {command!r}",
        "The command line knows a fixed set of commands.",
        "Run `mapper --help` for the list.",
    ),
    "M902": Message(
        "{problem}",
        "The arguments do not fit the command.",
        "Run `mapper COMMAND --help` for its arguments and an example.",
    ),
    "M903": Message(
        "no spec is named, and {source} names no architecture",
        "A spec is found by its id, by an architecture, or by a path; without one the config's `architectures` decides.",
        "Name the spec, as in `mapper check deepseek_v2 --checkpoint FOLDER`.",
    ),
    "M904": Message(
        "there is no config: {source} has none beside it",
        "Sizes, index ranges and conditions of the rules are computed from the model's config.json.",
        "Give it with --config FILE.",
    ),
    "M905": Message(
        "the spec {spec!r} has the runtimes {known}, and none is chosen",
        "Each runtime lays the same checkpoint out in another way; which one is meant cannot be guessed.",
        "Choose one with --runtime.",
    ),
    "M906": Message(
        "the option {text!r} is not NAME=VALUE",
        "An option of a spec is a name and a YAML value, such as mega_moe=true.",
        "Write --option NAME=VALUE, once for each option.",
    ),
    "M907": Message(
        "the option {name!r} is given twice",
        "One of the two values would be lost without a word.",
        "Remove one.",
    ),
    "M908": Message(
        "{num_skips} --skip and {num_whys} --why: expected one --why TEXT after each --skip PATTERN",
        "A tensor that is left out is left out for a reason, which the report repeats.",
        "Write --skip PATTERN --why TEXT, once for each pattern.",
    ),
    "M909": Message(
        "the skip {pattern!r} or its reason is empty",
        "A skip names tensors and says why they are not wanted.",
        "Write --skip PATTERN --why TEXT.",
    ),
    "M910": Message(
        "the targets {path!r} are not {expected}: found {found}",
        "The targets of a model are its parameters by name, each with shape and dtype; one object, or one for each rank.",
        'Write {{"NAME": {{"shape": [2, 3], "dtype": "bfloat16"}}}}, a list of such objects, or {{"ranks": [...]}}.',
    ),
    "M911": Message(
        "in the targets {path!r} {name!r} has {problem}",
        "A parameter has a local shape, sizes of 0 or more, and a dtype as torch or safetensors spell it.",
        "Correct the entry.",
    ),
    "M912": Message(
        "the model {name!r} cannot be built: {problem}",
        "A model is a class of Transformers, or a factory `package.module:function` that returns a module or a mapping.",
        "Check the name, and that its package can be imported here.",
    ),
    "M914": Message(
        "{command!r} needs {package}, which is not installed",
        "The base install reads specs and headers only; tensors need more packages.",
        "Install it: `pip install mapper-weights[{extra}]`.",
    ),
    "M915": Message(
        "there is no message {name!r}; codes run from {first} to {last}",
        "Every message has a code of M and three digits.",
        "Copy the code from the output; `mapper explain` explains one code, or one name.",
    ),
    "M916": Message(
        "{name!r} is no source and no target of the runtime {runtime!r} of the spec {spec!r}",
        "No rule, skip or keep names it for this config.",
        "Compare it with the nearest rules that `mapper explain` prints; then correct the name, or add a rule or a skip.",
    ),
    "M920": Message(
        "there is no row {name!r} to measure: {known}",
        "`mapper bench` measures rows by name, all of them by default.",
        "Take one of the names.",
    ),
    "M921": Message(
        "{text!r} does not name an interpreter",
        "A loader that is installed elsewhere is measured with the Python of that environment.",
        "Write NAME=PATH, such as vllm=/opt/vllm/bin/python.",
    ),
    "M990": Message(
        "internal error: {error}",
        "This is a bug in mapper, not in what it was given.",
        "Report it with the traceback and the command; nothing was decided about the checkpoint.",
    ),
}
