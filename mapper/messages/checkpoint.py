"""M4xx: checkpoint files, indexes and manifests."""

from mapper.messages.message import Message

MESSAGES: dict[str, Message] = {
    "M401": Message(
        "{path!r} does not exist",
        "A checkpoint is a folder, an index, a manifest, a .safetensors file or a list of such files.",
        "Check the path; a link may point to a file that was removed.",
    ),
    "M402": Message(
        "{path!r} holds no .safetensors file: {found}",
        "Only the safetensors format is read: it can be checked before a byte is loaded, and it runs no code.",
        "Point at the folder that holds the .safetensors files; convert .bin or .pt files to safetensors first.",
    ),
    "M403": Message(
        "{path!r} holds {count} indexes and none is model.safetensors.index.json: {names}",
        "Each index describes a checkpoint of its own; which one is meant cannot be guessed.",
        "Open the index file itself.",
    ),
    "M404": Message(
        "{path!r} is not a checkpoint: expected a folder, a .safetensors file, an index or a manifest (.json, .json.gz)",
        "The kind of a checkpoint is told by its path.",
        "Open one of these; convert other formats to safetensors first.",
    ),
    "M405": Message(
        "the list of files {problem}",
        "A list names the files of one checkpoint, each once.",
        "Give at least one file, and each file once.",
    ),
    "M406": Message(
        "{path!r} cannot be read: {reason}",
        "The system refused to open or read the file.",
        "Check the permissions of the file and of its folder.",
    ),
    "M410": Message(
        "{path!r} is a git-LFS pointer, not the file itself",
        "The repository was cloned without its large files: git left a short text in the place of each.",
        "Run `git lfs pull` in the folder, or download the file itself.",
    ),
    "M411": Message(
        "the {what} holds a git conflict marker {marker!r}",
        "A merge was committed unresolved; both sides lie in the file.",
        "Keep one side, or download the file again.",
    ),
    "M412": Message(
        "the {what} {path!r} is not JSON: {reason}",
        "The file is cut off, of another kind, or was edited by hand.",
        "Download or write the file again.",
    ),
    "M413": Message(
        "{path!r} gives keys twice: {keys}",
        "JSON readers keep one of the two and drop the other without a word.",
        "Remove one entry, or write the file again.",
    ),
    "M414": Message(
        "the {what} {path!r} is not {expected}: found {found}",
        "The JSON is well formed but does not have the shape of this kind of file.",
        "Check that the path is the file that was meant.",
    ),
    "M420": Message(
        "missing {num_files} that the index names: {files}, with {num_tensors} of {total} tensors: {tensors}",
        "A download that stopped half way leaves an index that names more files than there are.",
        "Download the missing files.",
    ),
    "M421": Message(
        "the index names {num_files} outside its folder: {files}",
        "A checkpoint lies in one folder: an absolute path, `..` or a linked subfolder would read whatever lies there.",
        "Move the files into the folder and name them relative to it.",
    ),
    "M422": Message(
        "the index gives no file name to {num_tensors}: {tensors}; expected a text, found {found}",
        "`weight_map` maps each tensor name to the name of the file that holds it.",
        "Write the index again.",
    ),
    "M423": Message(
        "{file!r} does not hold {num_tensors} that the index gives to it: {tensors}",
        "Index and files are from different versions, or the file was written without these tensors.",
        "Download the file and the index again, or remove the names from the index if nothing needs them.",
    ),
    "M424": Message(
        "the index gives {num_tensors} to {file!r}, found in {other!r}: {tensors}",
        "Index and files are from different versions: the other file may hold other values than the index meant.",
        "Download the files and the index again, or write the index again from the files.",
    ),
    "M430": Message(
        "{path!r} is not a safetensors file: it has {size} bytes, fewer than the 8 of the header length",
        "The file is empty or was cut off at once.",
        "Download or write the file again.",
    ),
    "M431": Message(
        "{path!r} is not a safetensors file: its first 8 bytes {start!r} as a header length are {length}, the limit is {limit}",
        "A safetensors file starts with the length of its header. Another kind of file shows here as a huge number.",
        "Download the file again; an HTML page, a zip or a pickle may lie in its place.",
    ),
    "M432": Message(
        "{path!r} is truncated within its header: expected at least {expected} bytes, found {size}",
        "The file is cut off before its header ends.",
        "Download or write the file again.",
    ),
    "M433": Message(
        "the header of {path!r} is not JSON: {reason}",
        "The bytes that describe the tensors are damaged, or the file is of another kind.",
        "Download or write the file again.",
    ),
    "M434": Message(
        "the header of {path!r} is not {expected}: found {found}",
        "A header maps each tensor name to its dtype, shape and data_offsets; __metadata__ maps texts to texts.",
        "Write the file again with the safetensors library.",
    ),
    "M435": Message(
        "in {path!r} tensor {name!r} is {found}, expected the keys {expected}{more}",
        "A key that is missing or unknown leaves open how the bytes are to be read.",
        "Write the file again.",
    ),
    "M436": Message(
        "in {path!r} tensor {name!r} has the unknown dtype {found!r}; known are {known}{more}",
        "The size and meaning of the elements are not known.",
        "Write the tensor with a dtype of the safetensors format.",
    ),
    "M437": Message(
        "in {path!r} tensor {name!r} has the shape {found}, expected a list of sizes >= 0 whose product fits in memory{more}",
        "A shape is a list of integers, each 0 or more; the size of the tensor in bits fits in 63 bits.",
        "Write the file again.",
    ),
    "M438": Message(
        "in {path!r} tensor {name!r} of dtype {dtype} and shape {shape} takes {found} bits, expected whole bytes{more}",
        "Elements of less than a byte are packed, and a tensor fills its last byte.",
        "Check dtype and shape.",
    ),
    "M439": Message(
        "in {path!r} tensor {name!r} has the data_offsets {found}, expected [begin, end] with 0 <= begin <= end{more}",
        "Offsets are integers and count bytes from the end of the header.",
        "Write the file again.",
    ),
    "M440": Message(
        "in {path!r} tensor {name!r} of dtype {dtype} and shape {shape} takes {expected} bytes, its offsets hold {found}{more}",
        "Dtype, shape and offsets contradict each other; at least one of them is wrong.",
        "Write the file again.",
    ),
    "M441": Message(
        "in {path!r} tensor {name!r} starts at byte {found} of the data, before {other!r} ends at {expected}{more}",
        "Two tensors would share bytes; the format gives every byte to one tensor.",
        "Write the file again.",
    ),
    "M442": Message(
        "in {path!r} tensor {name!r} starts at byte {found} of the data, expected {expected}: there is a hole before it{more}",
        "Every byte of the data belongs to a tensor; a hole is a tensor that was lost, or an offset that is wrong.",
        "Write the file again with the safetensors library.",
    ),
    "M443": Message(
        "{path!r} is truncated: expected {expected} bytes, found {size}; past the end {num_tensors}, first {name!r}",
        "The file is cut off: a download or a copy stopped.",
        "Download the file again.",
    ),
    "M444": Message(
        "{path!r} goes on after its last tensor: expected {expected} bytes, found {size}",
        "Header and data are not from the same write, or something was appended.",
        "Download or write the file again.",
    ),
    "M450": Message(
        "{num_tensors} in both {file!r} and {other!r}: {tensors}",
        "Without an index nothing says which one is meant, even when the bytes are equal today.",
        "Give the list of files to read, remove the file that is not meant, or add an index.",
    ),
    "M451": Message(
        "{path!r} has no index and lacks {count} of the {total} files {pattern!r}: {files}",
        "File names of the form NAME-00001-of-00003 count the parts; without an index they are all that says what is missing.",
        "Download the missing files, or open the list of files that is meant.",
    ),
}
