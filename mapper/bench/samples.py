"""What a fresh process measures: one loader on one input. `python -m mapper.bench.samples LOADER INPUT [LAYOUT]`.

Prints one JSON object: a sample, or `{"absent": reason}`. Every loader starts with a model in memory (or, for those called
`*_build`, with nothing) and ends when every parameter holds its values; imports are done before.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mapper.bench.measure import Sample, Watch

Loader = Callable[[Path, str], Sample]


def main() -> None:
    name, folder, *rest = sys.argv[1:]
    try:
        found: dict[str, Any] = asdict(LOADERS[name](Path(folder), rest[0] if rest else "tp=1"))
    except ImportError as error:
        found = {"absent": str(error)}
    print(json.dumps(found))


# --- the floor --------------------------------------------------------------------------------------------------------


def floor(folder: Path, layout: str) -> Sample:
    """Parse the headers and copy every tensor into one block of memory: no names, no proof, no model."""
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    block = memoryview(bytearray(size))
    with Watch() as watch:
        position = 0
        for path in files:
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
                spans = sorted(each["data_offsets"] for name, each in header.items() if name != "__metadata__")
                for first in range(0, len(spans), 1000):
                    buffers = []
                    for begin, end in spans[first : first + 1000]:
                        buffers.append(block[position : position + end - begin])
                        position += end - begin
                    os.preadv(stream.fileno(), buffers, 8 + length + spans[first][0])
    return watch.sample


def memcpy(folder: Path, layout: str) -> Sample:
    """Copy the bytes of the files from the mapped page cache to memory that has been written before."""
    sources = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        sources.append(torch.frombuffer(mapped, dtype=torch.uint8))
    targets = [torch.zeros_like(source) for source in sources]
    for source in sources:
        source.max()
    with Watch() as watch:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
    return watch.sample


# --- mapper -----------------------------------------------------------------------------------------------------------


def mapper_load(folder: Path, layout: str) -> Sample:
    """mapper, everything from opening the files to the report, onto tensors with the names and shapes of vLLM's."""
    import mapper
    from mapper.load import Loader, allocate

    checkpoint = mapper.Checkpoint.open(folder)
    model = allocate(_program(folder, layout).plan(checkpoint))
    _touch(model.values())
    with Watch() as watch:
        program = _program(folder, layout)
        Loader(program, model).load(mapper.Checkpoint.open(folder))
    return watch.sample


def mapper_vllm(folder: Path, layout: str) -> Sample:
    """The same onto a real model of vLLM."""
    import mapper
    from mapper.load import Loader

    with _vllm_model(folder, layout) as (model, _):
        parameters = dict(model.named_parameters(remove_duplicate=False))
        _touch(parameters.values())
        with Watch() as watch:
            Loader(_program(folder, layout), parameters).load(mapper.Checkpoint.open(folder))
        return watch.sample


def mapper_build(folder: Path, layout: str) -> Sample:
    """mapper with Transformers' model built on meta, building included."""
    import mapper
    from mapper.integrations.transformers import build
    from mapper.load import Loader

    with Watch() as watch:
        model = build(folder)
        checkpoint = mapper.Checkpoint.open(folder)
        assert checkpoint.config is not None
        program = mapper.compile(_spec(checkpoint.config), config=checkpoint.config, runtime="transformers")
        Loader(program, model).load(checkpoint)
    return watch.sample


def mapper_feed(folder: Path, layout: str) -> Sample:
    """An update session fed with every tensor from memory, the first of a loader."""
    return _fed(folder, layout, num_before=0)


def mapper_feed_again(folder: Path, layout: str) -> Sample:
    """The second update of the same loader."""
    return _fed(folder, layout, num_before=1)


def _fed(folder: Path, layout: str, *, num_before: int) -> Sample:
    import mapper
    from mapper.load import Loader, allocate

    checkpoint = mapper.Checkpoint.open(folder)
    program = _program(folder, layout)
    model = allocate(program.plan(checkpoint))
    _touch(model.values())
    tensors = list(_tensors(folder))
    loader = Loader(program, model)
    for _ in range(num_before):
        with loader.update(scope="all") as session:
            session.feed_all(tensors)
    with Watch() as watch, loader.update(scope="all") as session:
        session.feed_all(tensors)
        session.finish()
    return watch.sample


# --- the others -------------------------------------------------------------------------------------------------------


def vllm(folder: Path, layout: str) -> Sample:
    """vLLM's default loader onto its own model."""
    with _vllm_model(folder, layout) as (model, config):
        from vllm.model_executor.model_loader import get_model_loader

        _touch(model.parameters())
        loader = get_model_loader(config.load_config)
        with Watch() as watch:
            loader.load_weights(model, config.model_config)
        return watch.sample


def vllm_feed(folder: Path, layout: str) -> Sample:
    """`load_weights` of vLLM's model, with every tensor in memory."""
    with _vllm_model(folder, layout) as (model, _):
        _touch(model.parameters())
        tensors = list(_tensors(folder))
        with Watch() as watch:
            model.load_weights(iter(tensors))
        return watch.sample


def transformers_build(folder: Path, layout: str) -> Sample:
    """`from_pretrained` of Transformers, building included."""
    import transformers

    config = json.loads((folder / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    with Watch() as watch:
        model_class.from_pretrained(folder, dtype="auto")
    return watch.sample


def safetensors_copy(folder: Path, layout: str) -> Sample:
    """`get_tensor` of safetensors and a copy into tensors that are there, without names changed or anything fused."""
    from safetensors import safe_open

    targets = {name: tensor.clone() for name, tensor in _tensors(folder)}
    with Watch() as watch:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    targets[name].copy_(file.get_tensor(name))
    return watch.sample


def fastsafetensors_copy(folder: Path, layout: str) -> Sample:
    """fastsafetensors on the CPU, and a copy into tensors that are there."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    targets = {name: tensor.clone() for name, tensor in _tensors(folder)}
    with Watch() as watch:
        loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: [str(path) for path in sorted(folder.glob("*.safetensors"))]})
        buffer = loader.copy_files_to_device()
        for name in loader.get_keys():
            targets[name].copy_(buffer.get_tensor(name))
        buffer.close()
        loader.close()
    return watch.sample


def runai_copy(folder: Path, layout: str) -> Sample:
    """runai-model-streamer, and a copy into tensors that are there."""
    from runai_model_streamer import SafetensorsStreamer

    targets = {name: tensor.clone() for name, tensor in _tensors(folder)}
    with Watch() as watch, SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in sorted(folder.glob("*.safetensors"))])
        for name, tensor in streamer.get_tensors():
            targets[name].copy_(tensor)
    return watch.sample


# --- what they share --------------------------------------------------------------------------------------------------


def _spec(config: Any) -> Any:
    import mapper

    return mapper.load_spec(config["architectures"][0])


def _program(folder: Path, layout: str) -> Any:
    import mapper

    config = json.loads((folder / "config.json").read_text())
    return mapper.compile(_spec(config), config=config, runtime="vllm", layout=mapper.Layout.parse(layout), rank=0)


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    for path in sorted(folder.glob("*.safetensors")):
        yield from load_file(path).items()


def _touch(tensors: Any) -> None:
    """Write to every page, so that no loader pays for the memory of the model."""
    for tensor in tensors:
        tensor.data.zero_()


@contextmanager
def _vllm_model(folder: Path, layout: str) -> Iterator[tuple[Any, Any]]:
    """Yield one rank of a real model of vLLM on the CPU, and its config; other ranks of a layout are not there."""
    from mapper.bench.vllm_model import vllm_model

    with vllm_model(folder, layout) as built:
        yield built


LOADERS: dict[str, Loader] = {
    each.__name__: each
    for each in (
        floor,
        memcpy,
        mapper_load,
        mapper_vllm,
        mapper_build,
        mapper_feed,
        mapper_feed_again,
        vllm,
        vllm_feed,
        transformers_build,
        safetensors_copy,
        fastsafetensors_copy,
        runai_copy,
    )
}

if __name__ == "__main__":
    main()
