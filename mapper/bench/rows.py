"""The rows of the table: what is compared with what, in which layout, and the bar that mapper is to reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """A loader of `samples`, and the words that say what it is."""

    loader: str
    words: str


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: our loaders against the others on one input.

    `bar` is the least ratio of the others' time to ours; `floor_bar` the largest ratio of our time to that of the floor.
    """

    name: str
    input: str
    layout: str
    ours: Peer
    others: tuple[Peer, ...]
    bar: float | None = None
    floor: Peer | None = None
    floor_bar: float | None = None


FLOOR = Peer("floor", "headers parsed, bytes scattered")
COPIES = (
    Peer("safetensors_copy", "safetensors get_tensor + copy"),
    Peer("fastsafetensors_copy", "fastsafetensors + copy"),
    Peer("runai_copy", "runai-model-streamer + copy"),
)

ROWS = (
    Row("experts", "experts", "tp=1", Peer("mapper_load", "mapper"), COPIES, None, FLOOR, 3.0),
    Row("experts-vllm", "experts", "tp=1", Peer("mapper_vllm", "mapper"), (Peer("vllm", "vLLM's default loader"),), 25),
    Row("experts-vllm-ep", "experts", "tp=8,ep=8", Peer("mapper_vllm", "mapper"), (Peer("vllm", "vLLM's default loader"),), 40),
    Row(
        "experts-transformers",
        "experts",
        "tp=1",
        Peer("mapper_build", "mapper, building included"),
        (Peer("transformers_build", "from_pretrained"),),
        25,
    ),
    Row("feed", "experts", "tp=1", Peer("mapper_feed", "first update"), (Peer("vllm_feed", "vLLM's load_weights"),), 8),
    Row(
        "feed-again",
        "experts",
        "tp=1",
        Peer("mapper_feed_again", "second update"),
        (Peer("vllm_feed", "vLLM's load_weights"),),
        20,
    ),
    Row(
        "matrices",
        "matrices",
        "tp=1",
        Peer("mapper_load", "mapper"),
        COPIES,
        1.0,
        Peer("memcpy", "the same bytes copied"),
        1.25,
    ),
)
