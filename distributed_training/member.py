"""Join a store network from your own training script.

    with distributed_training.join("network.toml", model, optimizer) as net:
        for batch in data:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            net.step(loss=loss)

The script keeps its model, optimizer, data and loop; :meth:`Net.step` does the rest of a miner's
work. It runs the miner's own loop: the same controller decides, the same code uploads, saves and
applies updates, and the same subscribers write the log, the events and the files for the dashboard
and ``dt-status``. Transfers run in threads, as in a miner.

The checkpoint in the run folder holds both the weights and the record of what was uploaded, so the
two always agree. A script that starts again continues from that checkpoint, whatever weights it has
loaded into the model itself.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed_training.common.backoff import Repeats
from distributed_training.common.kinds import import_plugins
from distributed_training.config import OPERATORS_FILE, Config, ConfigError, load_config, problems
from distributed_training.config.loader import argv_of
from distributed_training.config.schema import schema
from distributed_training.miner import build
from distributed_training.miner import events as ev
from distributed_training.miner.build import RankContext, StartupInfo, open_data
from distributed_training.miner.events import Action, Command, LocalPart
from distributed_training.miner.launcher import occupied
from distributed_training.miner.loop import IDLE_WAIT, RankLoop
from distributed_training.miner.ranks import RankChannel
from distributed_training.miner.run_folder import forget_ranks, write_instance
from distributed_training.miner.start import CONTROL_TIMEOUT
from distributed_training.node.start import NetworkFailure, make_run_folder
from distributed_training.protocol.types import StepReport
from distributed_training.telemetry.facts import SCRIPT, SETTINGS
from distributed_training.telemetry.logs import LineFormatter, register_secret
from distributed_training.telemetry.run_state import (
    LauncherFile,
    report_running,
    report_stage,
)
from distributed_training.training.collectives import Layout, open_stream
from distributed_training.training.frozen import FrozenTensorError
from distributed_training.training.script_weights import (
    ScriptWeights,
    UndoneUpdates,
    optimizers_of,
)

log = logging.getLogger(__name__)

PACKAGE = "distributed_training"  # name of the logger for our lines
_CLOSED = "the script left the network"
_SAY_AGAIN = 600.0  # seconds between two log lines about the same cause
# Limit on the boundaries in close(). Unless something fails, the stop comes at the next one.
_MOST_BOUNDARIES = 1000
_joins = itertools.count()
_members: dict[Path, Net] = {}  # run folder -> the membership, until it is left
#: Everything here is built on this device, because a script may have changed torch's default.
_HOST = torch.device("cpu")


def join(
    network: str | os.PathLike[str] | None,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    **settings: Any,
) -> Net:
    """Join a store network with ``model``, which gets the network's weights.

    Call it on each rank, after the model has been wrapped (DDP, ``fully_shard``) and the optimizer
    has been made. The weights come from the network or, after a restart, from the run folder; the
    script must keep the optimizer's state itself. Settings are also read from the environment,
    ``.env`` and ``miner.toml``.

    Args:
        network: File, URL or name, as for ``--network``; None for the network that ``miner.toml``
            in the working folder names.
        model: Has the network's parameters, with the same names and shapes. The parameters that
            the network trains are float32 and require gradients; the frozen ones require none, and
            get the network's values.
        optimizer: The optimizer that trains the model, or several.
        **settings: Settings of ``miner.toml`` by name, with ``_`` instead of a dot, such as
            ``wallet_name="w"``.

    Returns:
        The membership: call its :meth:`Net.step` after each step of the optimizer.

    Raises:
        ValueError: With one line, for settings, a model or an optimizer that do not fit.
        RuntimeError: If the chain or the store cannot be reached.
    """
    optimizers, config = optimizers_of(optimizer), _config_of(network, settings)
    if (net := _members.get(folder := config.run_folder.absolute())) is not None:
        log.info("join() was called again: the previous membership in %s ends", folder)
        # This happens when a notebook cell is run again, or a Trainer is created again.
        net.close() if net._may_save() else net._leave()
    ranks = _meet()
    import_plugins(config.general.plugins)
    with _HOST, ExitStack() as stack:
        net = _assemble(model, optimizers, config, ranks, stack)
        net.keep(stack.pop_all(), folder)
    return net


class Net(RankLoop):
    """A script's membership of a network, which :func:`join` returns; leaving its context ends it.

    Examples:
        ```python
        import distributed_training

        with distributed_training.join("network.toml", model, optimizer) as net:
            for batch in net.batches():  # or your own batches
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                net.step(loss=loss)
            print(net.outer_step, net.verdict)
        ```
    """

    _weights: ScriptWeights

    def __init__(
        self,
        *,
        optimizer: Optimizer,
        rank_zero: build.RankZero | None,
        **given: Any,
    ) -> None:
        super().__init__(controller=None if rank_zero is None else rank_zero.controller, **given)
        self._optimizer, self._rank_zero = optimizer, rank_zero
        self._called = time.perf_counter()  # time of the script's last call of step()
        self._counted = self._weights.steps.step_count
        self._sequences = self._micro_batches = 0  # numbers yielded since the last step
        self._granted = False  # True if the last command allowed a micro-batch, not used yet
        self._not_finite = False  # True if the last loss was NaN or Inf: then nothing is saved
        self._ended = self._closed = False
        # True while a boundary changes weights, and after an interrupt that stopped the change.
        self._changes_weights = False
        self._repeats = Repeats(_SAY_AGAIN)
        self._undone = UndoneUpdates(self._weights.shards)
        self._stack = ExitStack()

    @property
    def outer_step(self) -> int:
        """The outer step from whose initial weights the model trains."""
        return self._weights.outer_step

    @property
    def inner_step(self) -> int:
        """Optimizer steps in this outer step, less those that an applied upload contains."""
        return self._weights.inner_step

    @property
    def verdict(self) -> str:
        """The verdict on this member in the words of ``dt-status``; empty except on rank 0."""
        return "" if self._rank_zero is None else self._rank_zero.facts.verdict

    def step(self, loss: Tensor | float | None = None, tokens: int | None = None) -> None:
        """Record an optimizer step, and upload, apply an update or save if that is due.

        Call it on each rank. If a new outer step has begun, the model has different weights
        afterwards. It never waits for the network, and an error in it only logs a warning.

        Args:
            loss: Mean loss of this rank's share of the step, in nats per token, for the log and
                the events.
            tokens: Tokens in this rank's share; None for the tokens that :meth:`batches` has
                yielded since the last call.
        """
        if self._ended:
            return
        if self._changes_weights:
            raise RuntimeError(
                "this membership was interrupted while it changed weights, so they may be half "
                "changed and nothing more is trained on them: call join() again, which continues "
                "from the last checkpoint"
            )
        with self._survives("net.step()"):
            self._count_step(loss, tokens)
        # Do this even if counting failed, since the other ranks wait for this one at the boundary.
        with self._survives("net.step()"):
            # Carry out one command after another until the script is to train again.
            if self._controller is not None:
                self._controller.idle_wait = 0.0
            while True:
                action = self.boundary().action
                if action is Action.STOP:
                    self._end()
                if action in (Action.TRAIN, Action.IDLE, Action.WAIT_FOR_DATA, Action.STOP):
                    self._granted = action is Action.TRAIN
                    break

    def batches(self) -> Iterator[Tensor]:
        """Yield micro-batches of the network's text, int64 ``(sequences, length)``, on each rank.

        It is the text that the network assigns, or the text in the files of ``data_own_text`` if
        members have their own. ``neuron_local_batch_size_train`` sets the number of sequences, 1
        by default.

        Raises:
            ValueError: If members have text of their own and ``data_own_text`` names no files.
        """
        if (data := self._data) is None:
            raise ValueError(
                "members of this network train on text of their own and data_own_text names none, "
                "so there is nothing to yield: pass data_own_text to join(), or use your own data"
            )
        while not self._ended:
            self._weights.in_step = self._micro_batches > 0
            if self._controller is not None:
                self._controller.idle_wait = IDLE_WAIT
            granted, self._granted = self._granted, False
            action = Action.TRAIN if granted else self.boundary().action
            if action is Action.STOP:
                self._end()
            elif action is Action.TRAIN:
                batch = data.next()
                if batch is None:
                    self._post(ev.MicroBatchEnded(trained=False))
                    continue
                self._sequences += len(batch)
                self._micro_batches += 1
                yield batch
                if self._micro_batches:  # no step has counted these micro-batches
                    self._post(ev.MicroBatchEnded())

    def close(self) -> None:
        """Write a checkpoint and end the membership. Call it on each rank.

        No checkpoint is written after an interrupt that may have left the weights half changed.
        """
        if self._closed:
            return
        if self._half_changed():
            log.warning(
                "An interrupt may have left the weights half changed, so no checkpoint is written: "
                "a restart will continue from the last one"
            )
        elif not self._ended:
            with self._survives("the last checkpoint"):
                self._weights.in_step = self._micro_batches > 0
                self._post(ev.StopRequested(_CLOSED))
                for _ in range(_MOST_BOUNDARIES):
                    if self.boundary().action is Action.STOP:
                        break
                self._end()
        self._leave()

    def _half_changed(self) -> bool:
        return self._changes_weights or self._weights.steps.under_way

    def _may_save(self) -> bool:
        """Return whether a checkpoint can be written after an interrupt."""
        # With several ranks, another one may be waiting in a collective that never ends.
        return not self._half_changed() and self._weights.stream.world_size == 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # After an error, the weights may be its cause.
        if kind is None or (self._may_save() and kind in (KeyboardInterrupt, SystemExit)):
            self.close()
        elif not self._closed:
            log.warning(
                "The script ended with %s, so no checkpoint is written: a restart will continue "
                "from the last one",
                kind.__name__,
            )
            self._leave()

    # --- inside ---------------------------------------------------------------------------------

    def keep(self, stack: ExitStack, folder: Path) -> None:
        """Close the contents of ``stack`` when the membership ends.

        Args:
            stack: Holds the threads, files and locks of this rank.
            folder: The run folder, in which this process has only one membership at a time.
        """
        self._stack = stack
        _members[folder] = self
        stack.callback(_members.pop, folder, None)
        atexit.register(self._leave)  # if the script neither calls close() nor leaves the context
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: None if (net := this()) is None else net._drop())

    def _drop(self) -> None:
        """Do nothing from now on, because the membership belongs to the parent of this fork."""
        self._ended = self._closed = True
        _members.clear()

    def _count_step(self, loss: Tensor | float | None, tokens: int | None) -> None:
        """Count the optimizer's steps since the last call, and report them."""
        weights, began = self._weights, self._called
        self._called = time.perf_counter()
        # Convert the tokens first: if that fails, the next call still counts the step.
        if tokens is None:
            tokens = self._sequences * weights.sequence_length
        tokens = int(tokens)
        taken = weights.steps.step_count - self._counted
        self._counted += taken
        if not taken:
            if (again := self._repeats("none")) is not None:
                log.warning(
                    "net.step() was called, but no optimizer has stepped since the last call, so "
                    "it does not count: call it once after each optimizer.step() (a step that a "
                    "GradScaler left out does not count)%s",
                    again,
                )
            return
        world = weights.stream.world_size
        weights.tokens_per_step = tokens * world // taken
        weights.inner_step += taken
        weights.total_inner_steps += taken
        micro_batches, self._micro_batches, self._sequences = self._micro_batches, 0, 0
        weights.in_step = False
        if self._undone.stepped() and (again := self._repeats("undone")) is not None:
            log.warning(
                "%s has restored weights from before the update of outer step %d, since it keeps a "
                "copy of the weights, so updates are lost here and the next upload undoes others' "
                "work: join with an optimizer that keeps no copy (docs/join-a-script.md)%s",
                type(self._optimizer).__name__,
                self.outer_step,
                again,
            )
        value = _number(loss)
        self._not_finite = loss is not None and not math.isfinite(value)
        if self._data is not None and not micro_batches and self._repeats("data") is not None:
            log.warning(
                "No text from net.batches() was trained on, but members of this network are judged "
                "on the text that it assigns: uploads are merged, but earn little score"
            )
        if self._controller is None:
            return
        cuda = weights.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(weights.device) / 1e9 if cuda else None
        report = StepReport(
            outer_step=weights.outer_step,
            inner_step=weights.inner_step,
            loss=value,
            learning_rate=float(self._optimizer.param_groups[0].get("lr", 0.0)),
            tokens=tokens * world,
            samples=tokens * world // weights.sequence_length,
            seconds=max(self._called - began, 1e-9),
            data_wait_seconds=0.0,
            micro_batches=max(1, micro_batches),
            gpu_memory_gb=memory,
            skipped=self._not_finite,
            total_inner_steps=weights.total_inner_steps,
        )
        self._post(ev.InnerStepDone(report))

    def _post(self, event: ev.Event) -> None:
        if self._controller is not None:
            self._controller.post(event)

    def _end(self) -> None:
        """Record that the membership has ended, after the last checkpoint was written."""
        self._ended = True
        if self._controller is not None:
            self._controller.drain()
            if (reason := self._controller.state.stop_reason) != _CLOSED:
                log.warning(
                    "This membership has ended (%s), and the script trains on its own from now "
                    "on: start it again once that is over",
                    reason,
                )

    def _leave(self) -> None:
        atexit.unregister(self._leave)
        if not self._closed:
            self._closed = self._ended = True
            if self._controller is not None and not self._counted:
                log.warning(
                    "net.step() was never called after an optimizer's step, so none of this "
                    "training reached the network: call it after each optimizer.step()"
                )
            with self._survives("net.close()"):
                self._stack.close()

    # --- the boundaries -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _survives(self, what: str) -> Iterator[None]:
        """Turn an error into a warning, since it must not end the script."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever the error is
            self._warn(what, error)

    def boundary(self) -> Command:
        """Decide what is due between two micro-batches, and carry it out."""
        with _HOST:
            command = super().boundary()
        self._changes_weights = False
        return command

    def _next_command(self) -> Command | None:
        with self._survives("the decision on what is due"):
            return super()._next_command()
        return Command(Action.IDLE)  # the other ranks wait for a command even after an error

    def _carry_out(self, command: Command) -> ev.Event | None:
        self._changes_weights = True  # until the boundary ends, which an interrupt may prevent
        action, skipped = command.action, ev.CheckpointBegun(self.outer_step, lambda: False)
        if action is Action.CHECKPOINT and self._may_be_bad():
            if (again := self._repeats("loss")) is not None:
                log.warning(
                    "The loss is NaN or Inf, so no checkpoint is written: a restart would continue "
                    "from the last one%s",
                    again,
                )
            return skipped
        before = self._undone.look() if action is Action.OUTER_STEP else None
        try:
            event = super()._carry_out(command)
            if before is not None:
                self._undone.updated(before)
            return event
        except Exception as error:  # noqa: BLE001 - it must not end the script
            if not isinstance(error, FrozenTensorError):  # the upload's log line explains it
                self._warn(action.name.lower().replace("_", " "), error)
            match action:
                case Action.OUTER_STEP:
                    return ev.OuterStepEnded(False, self.outer_step, str(error))
                case Action.CHECKPOINT:
                    return skipped
                case Action.WRITE_UPLOAD if (close := command.local.close) is not None:
                    why = f"it was not written ({error})"
                    return ev.UploadEnded(close, why)
            return None

    def _micro_batch(self) -> ev.Event | None:
        return None  # the script trains, after this boundary

    def _save_last(self, local: LocalPart) -> None:
        if not self._may_be_bad():
            self._save_checkpoint(local)

    def _may_be_bad(self) -> bool:
        """Return whether a rank's last loss was NaN or Inf. Collective."""
        return self._weights.stream.sum([float(self._not_finite)])[0] > 0

    def _warn(self, what: str, error: Exception) -> None:
        if (again := self._repeats((what, type(error).__name__))) is not None:
            log.warning("%s failed; training continues%s", what, again, exc_info=error)


def _number(loss: Tensor | float | None) -> float:
    """Return the loss; NaN if there is none."""
    if isinstance(loss, Tensor):
        loss = loss.detach()  # torch warns if a tensor with a graph becomes a float
    try:
        return math.nan if loss is None else float(loss)
    except (TypeError, ValueError, RuntimeError):  # such as a tensor of several values
        return math.nan


# --- building it ----------------------------------------------------------------------------------


def _config_of(network: str | os.PathLike[str] | None, settings: dict[str, Any]) -> Config:
    """Return the configuration. Raises ConfigError."""
    known, environ = schema("miner"), dict(os.environ)
    names = {setting.name.replace(".", "_"): setting for setting in known.flags}
    given: dict[str, str] = {}
    for name, value in {**settings, "network": network}.items():
        if value is None:
            continue
        setting = names.get(name) or known.find(name)
        text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        if setting.secret and setting.env:
            environ[setting.env] = text
        else:
            given[setting.name] = text
    argv = argv_of(given)
    config = load_config("miner", argv, environ=environ, file=OPERATORS_FILE, check=False)
    config = replace(config, of_script=True)
    for problem in problems(config):
        raise ConfigError(problem)
    return config


def _meet() -> RankChannel:
    """Return the ranks of this script: those of its process group, if it has made one."""
    number = next(_joins)  # each join needs its own prefix, since keys stay in the store
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return RankChannel(rank=0, world_size=1, group=None, store=dist.HashStore())
    return RankChannel(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        # Use gloo even if there is NCCL: a command must not wait for what is queued on the GPU.
        group=dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT),
        store=dist.PrefixStore(f"{PACKAGE}-{number}", dist.distributed_c10d._get_default_store()),
    )


def _assemble(
    model: nn.Module,
    optimizers: list[Optimizer],
    config: Config,
    ranks: RankChannel,
    stack: ExitStack,
) -> Net:
    """Build the membership of one rank. Raises ConfigError, NetworkFailure, OSError, ValueError."""
    events = SimpleQueue[ev.Event]()
    config, info, connections = build.share_start(
        config, ranks, lambda: _open(config, stack, events.put)
    )
    if info.problem:
        raise NetworkFailure(f"rank 0 could not join: {info.problem}")
    stream = open_stream(Layout(ranks.rank, ranks.world_size))
    folder, hidden = config.run_folder.absolute(), None
    if not (folder / "instance.json").exists():
        hidden = (
            f"{folder} is not rank 0's folder here, so its checkpoints would lack this rank's "
            "part: choose a neuron_run_folder that all machines share"
        )
    stream.raise_if_any(hidden, ConfigError)
    weights = ScriptWeights(
        model,
        optimizers,
        settings=config.training,
        model_config=info.model_config,
        stream=stream,
        frozen=config.frozen_weights,
    )
    stack.callback(weights.steps.close)
    context = RankContext(config, folder, weights.device, ranks, events, stack, guest=True)
    data = open_data(context, info, weights.micro_batch_size) if config.reads_text else None
    held = build.resume(context, info, weights, data, connections)
    rank_zero, round_rank = build.build_rounds(context, info, connections, held)
    if rank_zero is not None:
        rank_zero.go_live(events.put)
        report_running(folder)
    return Net(
        optimizer=optimizers[0],
        rank_zero=rank_zero,
        ranks=ranks,
        weights=weights,
        data=data,
        checkpointer=held.checkpointer,
        round_rank=round_rank,
    )


def _open(
    config: Config, stack: ExitStack, post: Callable[[ev.Event], None]
) -> tuple[build.Connections, StartupInfo]:
    """Take the run folder and connect to the network. Only rank 0 does that."""
    folder = make_run_folder(config)
    _open_log(config, stack)
    file = LauncherFile(folder)
    stack.enter_context(occupied(config, folder))
    file.owned = True
    forget_ranks(folder)  # a miner that ran here may have left files
    write_instance(folder)
    file.start()

    def ended(kind: object, error: BaseException | None, trace: object) -> None:
        file.stopped(SETTINGS if error else SCRIPT, str(error or ""))

    stack.push(ended)
    report_stage(folder, 2, "asking chain and store")
    return build.open_connections(config, folder, stack, post)


def _open_log(config: Config, stack: ExitStack) -> None:
    """Make sure that our lines are logged, without touching what the script has set up."""
    for value in config.values.values():
        if hasattr(value, "get_secret_value"):
            register_secret(value)
    logger = logging.getLogger(PACKAGE)
    before = list(logger.handlers), logger.level, logger.propagate

    def restore() -> None:
        logger.handlers[:], level, logger.propagate = before
        logger.setLevel(level)

    stack.callback(restore)
    requests = logging.getLogger("httpx")
    if requests.level == logging.NOTSET:  # after basicConfig, httpx logs a line per request
        requests.setLevel(logging.WARNING)
        stack.callback(requests.setLevel, logging.NOTSET)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        output = logging.StreamHandler(sys.stdout)
        output.setFormatter(LineFormatter(rank=0))
        logger.addHandler(output)
        # If the script added a handler to the root logger later, lines would appear twice.
        logger.propagate = False
