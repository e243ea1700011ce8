from pathlib import Path

import pytest
from contracts.tracker import Record, RecordContract
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from burnish.tracking.tensorboard import TensorBoardTracker


class TestTensorBoardTracker(RecordContract):
    def open(self, directory: Path, resume_step: int | None = None) -> TensorBoardTracker:
        # TensorBoard orders files by second, host, process and a count without leading zeros; the
        # sessions of a run are processes seconds apart, those of a test are not.
        for count, path in enumerate(sorted((directory / "tensorboard").glob("*"))):
            path.rename(path.with_name(f"{count:03}-{path.name}"))
        return TensorBoardTracker(directory / "tensorboard", resume_step=resume_step)

    def read(self, directory: Path) -> Record:
        """As TensorBoard itself reads the files."""
        events = EventAccumulator(str(directory / "tensorboard"))
        events.Reload()
        record: Record = {}
        for name in events.Tags()["scalars"]:
            for scalar in events.Scalars(name):
                record.setdefault(scalar.step, {})[name] = scalar.value
        return record


def test_logging_after_close_is_refused(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.close()
    with pytest.raises(ValueError, match="after close"):
        tracker.log(1, {"a": 1.0})
