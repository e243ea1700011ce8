"""Compare the copies of a model bit for bit: a device that computes or stores wrongly makes them differ.

With `engine.replicas` all copies get the same gradients, so they stay equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import xxhash

from burnish.distributed.collectives import gather_objects
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine, Part
from burnish.errors import BurnishError, few


def check_replicas(engines: Mapping[str, Engine], replicas: int, step: int, layout: Layout) -> None:
    """Raise `BurnishError` on every rank if trained weights differ between copies. Collective.

    Names the ranks in the minority, or all without a majority, and their tensors.
    """
    own_checksums: dict[str, list[str]] = {}
    for role, engine in engines.items():
        for shard in engine.shards(Part.WEIGHTS):  # a rank may hold several pieces of a tensor
            pieces = own_checksums.setdefault(f"{shard.spec.name} of the {role}", [])
            pieces.append(shard.checksum())
    every = gather_objects(xxhash.xxh3_128_hexdigest(repr(own_checksums).encode()), layout)
    size = layout.world // replicas
    # Rank r holds the same boxes as ranks r + size, r + 2 size and so on.
    odd = {place: _odd(every[place::size]) for place in range(size)}
    if not any(odd.values()):
        return
    differing = odd[layout.rank % size]
    all_checksums = gather_objects(own_checksums if differing else None, layout)
    differences = []
    for place, numbers in odd.items():
        copies = [each for each in all_checksums[place::size] if each is not None]
        names = [
            name
            for name in (copies[0] if copies else ())
            if any(each[name] != copies[0][name] for each in copies)
        ]
        ranks = [place + size * number for number in numbers]
        if ranks:
            differences.append(f"rank {', '.join(map(str, ranks))}: {few(names)}")
    raise BurnishError(
        f"step {step}: copies of the weights differ, so a device has computed or stored wrongly",
        have="; ".join(differences),
        want=f"{replicas} equal copies (engine.replicas)",
        do="test the devices of these ranks and leave out the faulty one, then start the same command again: "
        "it resumes from the newest step, whose copies were equal",
    )


def _odd(digests: list[str]) -> list[int]:
    """Return the copies that differ from most; all of them without a majority."""
    (most, count), *others = Counter(digests).most_common()
    if not others:
        return []
    agreed = 2 * count > len(digests)
    return [number for number, each in enumerate(digests) if not agreed or each != most]
