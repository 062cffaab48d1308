"""What a training saves, when, and what it does where that fails: it warns, and loses nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from webgemma.cli.out_folder import OutFolder
from webgemma.cli.terminal import err, say
from webgemma.errors import GgufError, InputError, WebgemmaError
from webgemma.lora.adapter import Adapter
from webgemma.lora.training import Checkpoints, Training
from webgemma.sync import run_sync


class Saver:
    """Saves a training in its folder: checkpoints, the best adapter, and the last one."""

    def __init__(
        self,
        training: Training,
        folder: OutFolder,
        notes: Mapping[str, Any],
        *,
        as_gguf: bool,
    ) -> None:
        self.training, self.folder = training, folder
        self.events: list[dict[str, Any]] = []  # a checkpoint each: its step, perhaps an error
        self.last: int | None = None  # the step of the checkpoint in the folder
        self._notes, self._as_gguf = notes, as_gguf
        self._unwritten_best: Adapter | None = None

    def checkpoints(self, steps: int | None, minutes: float | None) -> Checkpoints:
        """Return how the training writes checkpoints."""
        return Checkpoints(self.folder.checkpoint, steps, minutes, self._notes, self._report)

    def save_best(self) -> None:
        """Write the adapter as the best so far, or keep it until the disk has room."""
        self._unwritten_best = run_sync(self.training.trainer.adapter())
        self._write_best()

    def stop(self) -> None:
        """Save a training that is interrupted: first the checkpoint, then its adapter.

        InputError, which says where everything is, if the checkpoint cannot be written."""
        try:
            run_sync(self.training.save(self.folder.checkpoint, self._notes))
        except GgufError as error:
            self._report(self.training.trainer.steps, error, quiet=True)
            raise self._elsewhere(error) from error
        self._report(self.training.trainer.steps, None)
        try:
            self.folder.write(self._adapter(), as_gguf=self._as_gguf)
        except WebgemmaError as error:
            say(err, f"warning: the adapter of this step was not written: {error}")

    def finish(self) -> None:
        """Write the adapter of a training that is done; then it needs no checkpoint any more.

        InputError, which says where the adapter is, if that fails."""
        try:
            self.folder.write(self._adapter(), as_gguf=self._as_gguf)
            self._write_best(again=True)
        except WebgemmaError as error:
            raise self._elsewhere(error) from error
        with suppress(OSError):
            self.folder.checkpoint.unlink(missing_ok=True)

    def save_after(self, error: WebgemmaError) -> str:
        """Save what there is after an error in a step; return a sentence on where it is.

        A loss that diverges ends the training, but its adapter may be of use; the checkpoint is
        from before. If the GPU is lost, nothing can be read from it."""
        if isinstance(error, InputError) and self.training.losses:
            with suppress(WebgemmaError):
                self.folder.write(self._adapter(), as_gguf=self._as_gguf)
                return f"The adapter as it was then is in {self.folder.path}."
        return self.what_is_kept()

    def what_is_kept(self) -> str:
        """Return a sentence on what --resume continues from; empty if there is nothing."""
        if self.last is None:
            return ""
        return (
            f"The checkpoint of step {self.last} is in {self.folder.path}; "
            "--resume continues from there."
        )

    def _report(self, step: int, error: GgufError | None, *, quiet: bool = False) -> None:
        self.events.append({"step": step} | ({} if error is None else {"error": str(error)}))
        if error is None:
            self.last = step
            self.folder.wrote(self.folder.checkpoint)
            self._write_best()
        elif not quiet:
            kept = "there is none yet" if self.last is None else f"that of step {self.last} is kept"
            line = f"no checkpoint of step {step}: {error} The training goes on; {kept}."
            say(err, f"warning: {line}")

    def _adapter(self) -> Adapter:
        return run_sync(self.training.trainer.adapter())

    def _write_best(self, *, again: bool = False) -> None:
        """Write the best adapter, if it is not yet written; only `again` raises an error."""
        if self._unwritten_best is None:
            return
        try:
            self.folder.write_best(self._unwritten_best)
            self._unwritten_best = None
        except WebgemmaError as error:
            if again:
                raise
            say(err, f"warning: the best adapter so far waits to be written: {error}")

    def _write_all(self, folder: OutFolder) -> None:
        """Write everything that is not in the training's own folder."""
        folder.write(self._adapter(), as_gguf=self._as_gguf)
        if self._unwritten_best is not None:
            folder.write_best(self._unwritten_best)
        run_sync(self.training.save(folder.checkpoint, self._notes))

    def _elsewhere(self, error: WebgemmaError) -> InputError:
        """Write to another disk what does not fit here; return an error that says where it is."""
        for find in (tempfile.gettempdir, Path.cwd, Path.home):
            with suppress(OSError, RuntimeError):  # to find one may take room on a disk, too
                place = Path(tempfile.mkdtemp(prefix="webgemma-adapter-", dir=find()))
                try:
                    self._write_all(OutFolder(place))
                except WebgemmaError:
                    shutil.rmtree(place, ignore_errors=True)
                    continue
                return InputError(
                    f"{error} The adapter and its checkpoint were written to {place} instead: "
                    f"move these files to {self.folder.path}."
                )
        kept = (
            self.what_is_kept() or "Nothing could be saved, nor in the folder of temporary files."
        )
        return InputError(f"{error} {kept}")
