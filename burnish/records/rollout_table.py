"""Scored rollouts in columns: what all ranks know of rollouts that one rank has whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any, NamedTuple, Self, overload

import numpy as np
import numpy.typing as npt

from burnish.records.samples import Completion, Prompt, Rollout, StopReason, digest_of

Groups = Sequence[Sequence[Rollout]]
"""Rollouts by prompt: a `RolloutTable`, or lists."""
EncodedTable = tuple[
    bytes, bytes, bytes, Sequence[tuple[Any, ...]], Sequence[tuple[Any, ...]], list[int]
]
"""A table as it travels, without objects, and the number of rollouts of each rank."""
Column = npt.NDArray[Any]

_PROMPT = np.dtype(
    [("index", "i8"), ("length", "i4"), ("digest", "V16"), ("kind", "i4"), ("count", "i4")]
)
_ROLLOUT = np.dtype(
    [
        ("group", "i4"),
        ("sample", "i4"),
        ("length", "i4"),
        ("kind", "i4"),
        ("place", "i4"),  # of the first of its parts
        ("reward", "f8"),
        ("greedy", "f8"),  # NaN: none
    ]
)
_MOST_TOKENS = 1 << 40


class RolloutKind(NamedTuple):
    """What many rollouts have alike, noted once."""

    stop_reason: StopReason | None
    weights_version: int
    later_versions: tuple[tuple[int, int], ...]
    experts: tuple[tuple[int, ...], str] | None
    """Shape and dtype."""
    error: str | None
    parts: tuple[str, ...]
    """The names in `Rollout.reward_parts`."""

    @classmethod
    def of(cls, rollout: Rollout) -> Self:
        """Note what a rollout has."""
        made = rollout.completion
        experts = None if made.experts is None else (made.experts.shape, made.experts.dtype.str)
        return cls(
            made.stop_reason,
            made.weights_version,
            tuple(made.later_versions),
            experts,
            rollout.reward_error,
            tuple(rollout.reward_parts),
        )


@dataclass(frozen=True, slots=True, eq=False)
class RolloutTable(Sequence[Sequence[Rollout]]):
    """Groups of G prompts, N rollouts end to end. Only indexing makes objects."""

    prompts: Column
    """[G] `_PROMPT`."""
    rows: Column
    """[N] `_ROLLOUT`."""
    parts: Column
    """Parts of all rewards, end to end, fp64."""
    prompt_kinds: Sequence[tuple[bool, str]]
    """Whether a prompt is a chat, and its source."""
    kinds: Sequence[RolloutKind]
    owners: Column
    """[N] the rank that has each; -1: all have it."""
    held: Column
    """[N] its place in `objects`; -1: this rank has only its numbers."""
    objects: Sequence[Rollout] = ()

    @classmethod
    def of(cls, groups: Groups, owner: int | None = None) -> RolloutTable:
        """Return groups as a table, with another owner if one is given."""
        if isinstance(groups, RolloutTable):
            if owner is None:
                return groups
            return replace(groups, owners=np.full_like(groups.owners, owner))
        objects = [each for group in groups for each in group]
        prompt_kinds, kinds = dict[tuple[bool, str], int](), dict[RolloutKind, int]()
        prompts, rows, parts = [], [], list[float]()
        for place, group in enumerate(groups):
            prompt = group[0].prompt
            alike = (prompt.messages is not None, prompt.source)
            number = prompt_kinds.setdefault(alike, len(prompt_kinds))
            digest = prompt.digest or digest_of(prompt.token_ids)
            prompts.append((prompt.index, len(prompt.token_ids), digest, number, len(group)))
            for each in group:
                number = kinds.setdefault(RolloutKind.of(each), len(kinds))
                greedy = nan if each.greedy_reward is None else each.greedy_reward
                length = len(each.completion.token_ids)
                rows.append((place, each.sample, length, number, len(parts), each.reward, greedy))
                parts += each.reward_parts.values()
        owners = [each.owner if owner is None else owner for each in objects]
        return cls(
            np.array(prompts, _PROMPT),
            np.array(rows, _ROLLOUT),
            np.array(parts, np.float64),
            [*prompt_kinds],
            [*kinds],
            np.array([-1 if each is None else each for each in owners], np.int64),
            np.arange(len(objects)),
            objects,
        )

    @classmethod
    def gathered(
        cls, tables: Sequence[EncodedTable], own: RolloutTable | None = None
    ) -> RolloutTable:
        """Join the tables of ranks 0, 1, ...; `own` is this rank's."""
        columns, counts = _joined(tables)
        owners = np.repeat(np.arange(len(counts)), counts)
        held = np.full(len(owners), -1)
        if own is not None:
            held[np.isin(owners, own.owners)] = own.held
        return cls(*columns, owners, held, own.objects if own else ())

    @classmethod
    def joined(cls, tables: Sequence[RolloutTable]) -> RolloutTable:
        """Return tables one after the other."""
        columns, counts = _joined([each.encoded() for each in tables])
        starts = np.cumsum([0, *(len(each.objects) for each in tables)])[:-1]
        held = np.concatenate([each.held for each in tables])
        return cls(
            *columns,
            np.concatenate([each.owners for each in tables]),
            np.where(held < 0, -1, held + np.repeat(starts, counts)),
            [one for each in tables for one in each.objects],
        )

    def encoded(self) -> EncodedTable:
        """Return it without owners and objects."""
        columns = self.prompts, self.rows, self.parts, self.prompt_kinds, self.kinds
        return _encoded(columns, [len(self.rows)])

    @staticmethod
    def merged(tables: Sequence[EncodedTable]) -> EncodedTable:
        """Join encoded tables of ranks."""
        return _encoded(*_joined(tables))

    def take(self, groups: Sequence[int] | Column) -> RolloutTable:
        """Return some groups, in this order."""
        chosen = np.asarray(groups, np.int64)
        prompts, ends = self.prompts.take(chosen), self.prompts["count"].cumsum()
        sizes = prompts["count"]
        numbers = np.arange(sizes.sum()) + np.repeat(ends[chosen] - sizes.cumsum(), sizes)
        rows = self.rows.take(numbers)  # an index of a structured array is slower
        rows["group"] = np.repeat(np.arange(len(chosen)), sizes)
        owners, held = self.owners[numbers], self.held[numbers]
        return replace(self, prompts=prompts, rows=rows, owners=owners, held=held)

    def with_rewards(self, rewards: Column, greedy: Column | None = None) -> RolloutTable:
        """Return it with other rewards [N], and greedy completions' [N] if given."""
        rows = self.rows.copy()
        rows["reward"] = rewards
        if greedy is not None:
            rows["greedy"] = greedy
        return replace(self, rows=rows)

    def with_part(
        self, name: str, values: Column, weight: float, errors: Mapping[int, str]
    ) -> RolloutTable:
        """Return it with one more part of the reward, [N], and errors by number."""
        rows, sizes = self.rows.copy(), self.by_kind(lambda kind: len(kind.parts))
        ends = (sizes + 1).cumsum()
        rows["reward"] += weight * values
        rows["place"] = ends - sizes - 1
        parts = np.empty(len(rows) + sizes.sum())
        parts[ends - 1] = values
        within = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
        before = self.parts[np.repeat(self.rows["place"], sizes) + within]
        parts[np.repeat(rows["place"], sizes) + within] = before
        kinds = {
            kind._replace(parts=(*kind.parts, name)): place for place, kind in enumerate(self.kinds)
        }
        every = [*kinds]
        for number, error in errors.items():
            kind = every[rows["kind"][number]]
            told = "; ".join(filter(None, (kind.error, error)))
            rows["kind"][number] = kinds.setdefault(kind._replace(error=told), len(kinds))
        return replace(self, rows=rows, parts=parts, kinds=[*kinds])

    @property
    def sizes(self) -> Column:
        """[G] rollouts of each group."""
        sizes: Column = self.prompts["count"]
        return sizes

    @property
    def sources(self) -> list[str]:
        """[G] where the prompts come from."""
        return [self.prompt_kinds[number][1] for number in self.prompts["kind"].tolist()]

    @property
    def groups(self) -> Column:
        """[N] number of its group."""
        groups: Column = self.rows["group"]
        return groups

    @property
    def places(self) -> list[tuple[int, int]]:
        """[N] the prompt's index in the data, and the sample."""
        indices = self.prompts["index"][self.groups]
        return list(zip(indices.tolist(), self.rows["sample"].tolist(), strict=True))

    @property
    def rewards(self) -> Column:
        """[N] fp64."""
        rewards: Column = self.rows["reward"]
        return rewards

    @property
    def greedy_rewards(self) -> Column:
        """[N] fp64, NaN where there is none."""
        greedy: Column = self.rows["greedy"]
        return greedy

    @property
    def lengths(self) -> Column:
        """[N] int64, tokens of each completion."""
        return self.rows["length"].astype(np.int64)

    @property
    def prompt_lengths(self) -> Column:
        """[N] int64, tokens of each rollout's prompt."""
        return self.prompts["length"].astype(np.int64)[self.groups]

    @property
    def digests(self) -> Column:
        """[N] names of the prompts' tokens, 16 bytes each."""
        digests: Column = self.prompts["digest"][self.groups]
        return digests

    @property
    def part_names(self) -> list[str]:
        """The parts of all rewards, by first rollout."""
        _, first = np.unique(self.rows["kind"], return_index=True)
        kinds = [self.kinds[number] for number in self.rows["kind"][np.sort(first)]]
        return list(dict.fromkeys(name for kind in kinds for name in kind.parts))

    def by_kind(self, value: Callable[[RolloutKind], int]) -> Column:
        """[N] int64, what `value` returns of each rollout's kind."""
        values = np.array([value(each) for each in self.kinds], np.int64)
        found: Column = values[self.rows["kind"]]
        return found

    @property
    def failed(self) -> Column:
        """Numbers of the rollouts without a whole reward."""
        return np.flatnonzero(self.by_kind(lambda kind: kind.error is not None))

    def part(self, name: str) -> tuple[Column, Column]:
        """Return [N] values of a part of the reward, 0 where it is missing, and [N] whether it is there."""
        places = self.by_kind(lambda kind: (*kind.parts, name).index(name))
        there = places < self.by_kind(lambda kind: len(kind.parts))
        values = np.zeros(len(there))
        values[there] = self.parts[(self.rows["place"] + places)[there]]
        return values, there

    def of_rank(self, rank: int) -> list[int]:
        """Return the numbers of the rollouts that a rank has whole."""
        return np.flatnonzero((self.owners < 0) | (self.owners == rank)).tolist()

    def by_group(self, values: Column) -> list[list[Any]]:
        """Return `values` [N] by group."""
        ends, numbers = self.sizes.cumsum().tolist(), values.tolist()
        return [numbers[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts as objects."""
        return [self.rollout(number) for number in range(len(self.rows))]

    def rollout(self, number: int) -> Rollout:
        """Return a rollout. Another rank's has tokens -1 and log-probs NaN, without memory."""
        group, sample, length, kind_number, place, reward, greedy = self.rows[number].item()
        kind, held, owner = self.kinds[kind_number], self.held[number], self.owners[number]
        values = self.parts[place : place + len(kind.parts)].tolist()
        known: dict[str, Any] = {
            "reward": reward,
            "reward_parts": dict(zip(kind.parts, values, strict=True)),
            "greedy_reward": None if isnan(greedy) else greedy,
            "owner": None if owner < 0 else int(owner),
            "reward_error": kind.error,
        }
        if held >= 0:
            own: Rollout = replace(self.objects[held], **known)
            return own
        index, asked, digest, prompt_kind, _ = self.prompts[group].item()
        is_chat, source = self.prompt_kinds[prompt_kind]
        prompt = Prompt(
            index, _ids(asked), "", [] if is_chat else None, None, source, {}, bytes(digest)
        )
        numbers = np.broadcast_to(np.float32(np.nan), _MOST_TOKENS)[:length]
        experts = kind.experts and np.broadcast_to(np.zeros((), kind.experts[1]), kind.experts[0])
        made = Completion(
            _ids(length),
            numbers,
            numbers,
            kind.stop_reason,
            kind.weights_version,
            experts,
            kind.later_versions,
        )
        return Rollout(prompt, sample, made, "", **known)

    def __len__(self) -> int:
        """Count the groups."""
        return len(self.prompts)

    @overload
    def __getitem__(self, index: int) -> list[Rollout]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sequence[Rollout]]: ...
    def __getitem__(self, index: int | slice) -> list[Any]:
        """Return the rollouts of a group."""
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]
        end = int(self.prompts["count"][: number + 1].sum())
        return [self.rollout(each) for each in range(end - int(self.sizes[number]), end)]


def _ids(count: int) -> npt.NDArray[np.int64]:
    return np.broadcast_to(np.int64(-1), _MOST_TOKENS)[:count]


_Columns = tuple[Column, Column, Column, Sequence[tuple[bool, str]], Sequence[RolloutKind]]
"""A table's, without owners and objects."""


def _encoded(columns: _Columns, counts: list[int]) -> EncodedTable:
    *data, prompt_kinds, kinds = columns
    prompts, rows, parts = (each.tobytes() for each in data)
    return prompts, rows, parts, prompt_kinds, [tuple(each) for each in kinds], counts


def _joined(tables: Sequence[EncodedTable]) -> tuple[_Columns, list[int]]:
    """Return the columns of tables end to end, and the number of rollouts of each rank."""
    dtypes = (_PROMPT, _ROLLOUT, np.dtype(np.float64))
    *data, prompt_kinds, kinds, ranks = zip(*tables, strict=True) if tables else [()] * 6
    prompts, rows, parts = (
        np.frombuffer(bytearray().join(each), dtype)
        for each, dtype in zip(data, dtypes, strict=True)
    )
    asked, counts, sizes = (
        [len(each) // dtype.itemsize for each in some]
        for some, dtype in zip(data, dtypes, strict=True)
    )
    for name, before in (("group", asked), ("place", sizes)):
        rows[name] += np.repeat(np.cumsum([0, *before])[:-1], counts).astype(np.int32)
    of_prompts = _merge(prompts["kind"], prompt_kinds, asked)
    of_rollouts = [RolloutKind(*each) for each in _merge(rows["kind"], kinds, counts)]
    return (prompts, rows, parts, of_prompts, of_rollouts), [n for some in ranks for n in some]


def _merge(numbers: Column, kinds: Sequence[Sequence[Any]], counts: Sequence[int]) -> list[Any]:
    """Return the kinds of all tables, each once; `numbers` become those of this list."""
    known = dict[Any, int]()
    new = np.array(
        [known.setdefault(each, len(known)) for some in kinds for each in some], np.int32
    )
    starts = np.cumsum([0, *map(len, kinds)])[:-1]
    numbers[:] = new[numbers + np.repeat(starts, counts)]
    return [*known]
