"""Teachers: frozen language models that score the student's sequences, as engines in its layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from burnish.config.distillation import DistillConfig, TeacherConfig
from burnish.config.frozen_models import teachers
from burnish.data.batching import make_batch
from burnish.data.columns import SOURCE_COLUMN
from burnish.data.tasks import Mixture, PromptDataset
from burnish.engines.base import Engine
from burnish.errors import UsageError, few
from burnish.methods.parts.policy_update import Forward
from burnish.models.divergence import (
    DivergenceProbe,
    Head,
    HeadProbe,
    Reference,
    StatesProbe,
    TopProbe,
    TopReference,
    WholeReference,
)
from burnish.models.flops import ModelFlops
from burnish.records import Batch, Example, MicroBatch, Prompt, TokenIds
from burnish.records.rollout_table import RolloutTable
from burnish.runs.frozen_engines import LoadedModel
from burnish.runs.setup import (
    Foundation,
    load_start,
    prompt_limits,
    run_rows,
    train_dataset,
)
from burnish.runs.verify_inputs import Intact


class NewPrompt(NamedTuple):
    """A prompt in place of a sequence's own."""

    token_ids: TokenIds
    length: int
    """How many tokens at the sequence's beginning it replaces."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """What a teacher is asked: the student's prompts, or those of a column of its own."""

    dataset: Sequence[Prompt] | None = None
    places: Mapping[int, int] = field(default_factory=dict)
    """By a row's number, its place in `dataset`, if it has one."""

    def reads(self, row: int) -> bool:
        """Return whether a row has a prompt, given its number."""
        return self.dataset is None or row in self.places

    def of_row(self, row: int) -> TokenIds | None:
        """Return the prompt of a row, given its number; None for the student's."""
        return None if self.dataset is None else self.dataset[self.places[row]].token_ids


@dataclass(frozen=True, slots=True)
class Teachers:
    """The teachers of a run on this rank."""

    config: DistillConfig
    forwards: Sequence[Forward]
    """Each scores a batch."""
    engines: Sequence[Engine]
    """Their engines, without the policy's own."""

    head: Head | None
    """The only teacher's output layer, if the whole vocabulary is compared."""
    prompts: Sequence[Prompts]
    """What each teacher is asked."""

    def of_sources(self, sources: Sequence[str]) -> list[int | None]:
        """Return the number of each source's teacher; None for a source without one."""
        places = {each.source: number for number, each in enumerate(self.config.teachers)}
        return [places.get(source, places.get(None)) for source in sources]

    def answered(self, batches: Sequence[Batch], table: RolloutTable) -> list[Batch]:
        """Add to rollouts what the teachers of their rows say. Collective."""
        by_group = self.of_sources(table.sources)
        lengths = table.prompts["length"].tolist()
        rows = table.prompts["index"].tolist()
        by_group = [
            teacher if teacher is not None and self.prompts[teacher].reads(row) else None
            for teacher, row in zip(by_group, rows, strict=True)
        ]
        groups = table.groups.tolist()

        @cache  # the rollouts of a group share it
        def prompt_of_group(group: int) -> NewPrompt | None:
            teacher = by_group[group]
            ids = None if teacher is None else self.prompts[teacher].of_row(rows[group])
            return None if ids is None else NewPrompt(ids, lengths[group])

        teachers = [by_group[group] for group in groups]
        return [
            self.taught(batch, teachers.__getitem__, lambda number: prompt_of_group(groups[number]))
            for batch in batches
        ]

    def taught(
        self,
        batch: Batch,
        teacher_of: Callable[[int], int | None],
        prompt_of: Callable[[int], NewPrompt | None] = lambda _: None,
    ) -> Batch:
        """Add `teacher_logprobs`, or a `probe` that compares with the teachers. Collective.

        The functions return an example's teacher, and what that one reads in place of the student's prompt.
        """
        answers: list[list[Tensor]] = [[] for _ in batch.microbatches]
        taught = [torch.zeros(int(m.loss_mask.sum()), dtype=torch.bool) for m in batch.microbatches]
        for teacher, forward in enumerate(self.forwards):
            own = [
                [number >= 0 and teacher_of(number) == teacher for number in numbers]
                for numbers in batch.examples
            ]
            asked = _sequences_of(batch, own, prompt_of)
            for place, said in enumerate(self._asked(forward, asked)):
                micro = batch.microbatches[place]
                rows = _is_of(micro, own[place])[micro.loss_mask]
                taught[place] |= rows
                wholes = answers[place]
                if not wholes:
                    wholes += [each.new_zeros(len(rows), *each.shape[1:]) for each in said]
                for whole, each in zip(wholes, said, strict=True):
                    whole[rows] = each
        if self.config.tokens == "sampled":
            columns = [
                torch.full(micro.loss_mask.shape, torch.nan).masked_scatter_(
                    micro.loss_mask, whole.masked_fill(~rows, torch.nan)
                )
                for micro, (whole,), rows in zip(batch.microbatches, answers, taught, strict=True)
            ]
            return batch.with_field("teacher_logprobs", columns)
        probes = [
            DivergenceProbe(self._reference(said, micro.temperature), rows)
            for said, rows, micro in zip(answers, taught, batch.microbatches, strict=True)
        ]
        return batch.with_field("probe", probes)

    def _asked(self, forward: Forward, batch: Batch) -> Iterator[Sequence[Tensor]]:
        """Yield of each micro-batch what a teacher says of its trained tokens, on the host."""
        config = self.config
        if config.tokens == "sampled":
            for output, micro in zip(forward(batch), batch.microbatches, strict=True):
                yield (output.logprobs.cpu()[micro.loss_mask],)
            return
        probe = TopProbe(config.k) if config.tokens == "topk" else StatesProbe()
        for output in forward(batch.with_field("probe", [probe] * len(batch.microbatches))):
            yield [each.cpu() for each in output.probed]

    def _reference(self, said: Sequence[Tensor], temperature: float) -> Reference:
        if self.head is None:
            ids, logprobs = said
            return TopReference(ids, logprobs, self.config.mix)
        (states,) = said
        options = replace(self.head.options, temperature=temperature)
        return WholeReference(states, Head(self.head.weight, options), self.config.mix)


def _is_of(micro: MicroBatch, chosen: Sequence[bool]) -> Tensor:
    """Return which tokens [T] belong to the chosen sequences of a micro-batch."""
    return torch.tensor(chosen).repeat_interleave(micro.cu_seqlens.diff())


def _sequences_of(
    batch: Batch,
    chosen: Sequence[Sequence[bool]],
    prompt_of: Callable[[int], NewPrompt | None],
) -> Batch:
    """Return a batch with some sequences of each micro-batch, after new prompts. A micro-batch without any keeps two tokens that are not trained on.

    So every rank runs as many micro-batches as the others, and no sequence leaves its rank.
    """
    micros = []
    for micro, numbers, own in zip(batch.microbatches, batch.examples, chosen, strict=True):
        cuts = micro.cu_seqlens.tolist()
        ids = list[Tensor]()
        masks = list[Tensor]()
        for place in np.flatnonzero(own).tolist():
            new = prompt_of(numbers[place])
            rest = slice(cuts[place] + (0 if new is None else new.length), cuts[place + 1])
            before = micro.input_ids[:0] if new is None else torch.from_numpy(new.token_ids)
            ids.append(torch.cat([before, micro.input_ids[rest]]))
            masks.append(torch.cat([torch.zeros(len(before)).bool(), micro.loss_mask[rest]]))
        if not ids:
            ids.append(torch.zeros(2, dtype=torch.int64))
            masks.append(torch.zeros(2).bool())
        lengths = torch.tensor([len(each) for each in ids])
        micros.append(
            MicroBatch(
                torch.cat(ids),
                torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
                torch.cat(masks),
                micro.num_tokens,
                micro.num_sequences,
                temperature=micro.temperature,
            )
        )
    return replace(batch, microbatches=tuple(micros))


def load_teachers(
    foundation: Foundation, policy: Engine, loaded: Mapping[str, LoadedModel], intact: Intact
) -> Teachers:
    """Return the models of `distill.teachers`. Those with weights of their own are `loaded`, by setting. Collective."""
    require_sources(foundation)
    config = foundation.config.distill
    own = {each.path: loaded[each.setting].engine for each in teachers(foundation.config)}
    forwards = list[Forward]()
    engines = list[Engine]()
    for teacher in config.teachers:
        if teacher.url is not None:
            from burnish.methods.parts.endpoint_teacher import EndpointTeacher

            timeout = foundation.config.rollout.timeout_seconds
            asked = EndpointTeacher(teacher, timeout, foundation.tokenizer, policy.layout)
            forwards.append(asked.forward)
            continue
        if teacher.is_start:
            engine = load_start(foundation, policy, intact)
            engines += [] if engine is policy else [engine]
        else:
            engine = own[teacher.path]
        forwards.append(partial(engine.forward, adapter=engine is not policy))
    head = _head(forwards[0], policy) if config.tokens == "all" else None
    prompts = [read_prompts(teacher, foundation) for teacher in config.teachers]
    return Teachers(config, forwards, engines, head, prompts)


def _head(forward: Forward, policy: Engine) -> Head:
    """Return a copy of a teacher's output layer. Collective."""
    nothing = Example(np.zeros(2, np.int64), np.zeros(2, np.bool_))
    batch = make_batch([nothing], policy.layout, 2, ModelFlops(1.0, {}, 1.0))
    batch = batch.with_field("probe", [HeadProbe()] * len(batch.microbatches))
    head: Head = forward(batch)[0].probed
    return head


def require_sources(foundation: Foundation) -> None:
    """Raise `UsageError` for a teacher whose source no row of `data.train` has, unless rows are streamed. Collective."""
    data = foundation.config.data
    wanted = {each.source for each in foundation.config.distill.teachers} - {None}
    if data.streaming or not wanted:
        return
    rows = run_rows(foundation, data.train, "data.train", None)
    values = rows.column(SOURCE_COLUMN) if SOURCE_COLUMN in rows.columns else []
    there = sorted({str(value) for value in values if value})
    for source in sorted(map(str, wanted - {*there})):
        raise UsageError(
            "no row has the source of a teacher, which would teach nothing",
            have=f"distill.teachers[].source: {source}; {few(there) or 'nothing'} in the column {SOURCE_COLUMN}",
            want="a source that rows have",
            do=f"correct distill.teachers[].source, or the rows' {SOURCE_COLUMN}",
        )


def read_prompts(teacher: TeacherConfig, foundation: Foundation) -> Prompts:
    """Read the prompts of a teacher. Collective.

    Raises `MissingError` if the rows lack its column, and `UsageError` for a row without a prompt in it.
    """
    column = teacher.prompt_column
    if column is None:
        return Prompts()
    data = foundation.config.data.model_copy(update={"prompt_column": column})

    def read(paths: Sequence[str], setting: str) -> PromptDataset:
        rows = run_rows(foundation, paths, setting, None)
        if not rows.has(column):
            raise rows.missing([column], "distill.teachers[].prompt_column")
        limits = prompt_limits(foundation)
        tokenizer = foundation.tokenizer
        return PromptDataset(rows, tokenizer, data, limits=limits, layout=foundation.layout)

    dataset = train_dataset(read, data)
    parts = dataset.parts if isinstance(dataset, Mixture) else [dataset]
    numbers = [part.first_index + part.rows.number(row) for part in parts for row in part.kept_rows]
    return Prompts(dataset, {number: place for place, number in enumerate(numbers)})


def dry_runs_of_teachers(foundation: Foundation) -> Iterator[Callable[[], object]]:
    """Yield what reads the prompts of teachers."""
    for teacher in foundation.config.distill.teachers:
        if teacher.prompt_column is not None:
            yield partial(read_prompts, teacher, foundation)
