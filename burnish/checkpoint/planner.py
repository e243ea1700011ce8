"""The plan of a save, made when tensors or their layout change and kept for all saves until then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from burnish.boxes.pieces import Described, PieceTable, gather_pieces
from burnish.checkpoint.blocks import Stored, plan_files
from burnish.checkpoint.destinations.disks import Disks
from burnish.checkpoint.dtypes import dtype_name
from burnish.checkpoint.tensor_sets import key_parts
from burnish.checkpoint.writer import WritePlan
from burnish.distributed.collectives import same_on_all_ranks
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """What is known of a step's files before a tensor is looked at."""

    writing: WritePlan
    """The tensor files, and who writes what of them."""
    indices: Mapping[str, bytes]
    """The index files that belong to them, by path."""


class Planner:
    """Plans the saves of the ranks of a layout, to one disk where no others are named."""

    def __init__(self, layout: Layout, disks: Disks | None = None) -> None:
        self.layout = layout
        """This process among those that save together."""
        self.disks = disks or Disks.one(layout.world)
        """Where they write to."""
        self._pieces = ""
        self._plan: SavePlan | None = None

    def digest(self, pieces: PieceTable) -> str:
        """Of the plan that was made for such pieces of this rank; "" for none."""
        if self._plan is None or pieces.digest() != self._pieces:
            return ""
        return self._plan.writing.digest

    def plan(self, pieces: PieceTable, roles: Iterable[str], known: Sequence[str]) -> SavePlan:
        """The plan for every rank's pieces, by the keys under which they are stored. Collective.

        `known` has every rank's `digest`; where all have the same plan, it is taken. Raises
        `MissingError` for a tensor that nobody has all of, and `BurnishError` where ranks disagree about one.
        """
        if self._plan is None or set(known) != {self._plan.writing.digest}:
            have = gather_pieces(pieces, self.layout)
            files, indices = plan_files(_stored(have, roles))
            plan = SavePlan(WritePlan.of(files, have, self.layout, self.disks), indices)
            same_on_all_ranks(plan.writing.digest, "the plan of the save", self.layout)
            self._pieces, self._plan = pieces.digest(), plan
        return self._plan


def _stored(have: Iterable[PieceTable], roles: Iterable[str]) -> list[Stored]:
    """Every tensor that any rank has a piece of, once."""
    found: dict[str, Stored] = {}
    seen: set[tuple[Described, ...]] = set()
    for table in have:
        for key, shape, dtype in () if table.tensors in seen else table.tensors:
            tensor_set, name = key_parts(key, roles)
            stored = Stored(tensor_set, name, dtype_name(dtype, name), shape)
            if found.setdefault(key, stored) != stored:
                raise BurnishError(
                    f"ranks disagree about tensor {key}",
                    have=f"{found[key].dtype} {list(found[key].shape)}",
                    want=f"{stored.dtype} {list(shape)}",
                    do="start all ranks with one configuration and one model",
                )
        seen.add(table.tensors)
    return list(found.values())
