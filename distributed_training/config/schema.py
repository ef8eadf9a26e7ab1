"""The flags that the settings declare: found by name, shown to people, and those retired.

A :class:`Schema` reads the declarations of ``settings.py``. From it follow what a start prints,
``config.txt`` and docs/flags.md; the loader asks it what a name means.

Retired flags are no settings: neither ``--help`` nor a settings class knows them. A flag without
effect is accepted with one line. A flag is refused if a run that relied on it would go wrong.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from annotated_types import Ge, Le
from pydantic import ByteSize, SecretStr
from pydantic.fields import FieldInfo

from .model import PRESETS, TITLES, USUAL, Config, Kind
from .settings import AllSettings
from .types import ConfigError, show

# How an operator calls each type, and what stands for a value in the help.
_TYPES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true|false"),
    ByteSize: ("a size such as 2147483648, 2GiB or 500MB", "SIZE"),
    timedelta: ("a duration such as 90s or 15m", "TIME"),
    Path: ("a path", "PATH"),
    int: ("a whole number", "N"),
    float: ("a number", "X"),
    str: ("at least one character", "TEXT"),
    SecretStr: ("at least one character", "TEXT"),
}


@dataclass(frozen=True)
class Setting:
    """One flag and the fields it feeds (usually one; two packages may need the same value)."""

    name: str
    env: str | None
    group: str
    field: FieldInfo
    places: tuple[tuple[str, str], ...]  # (package, field name)
    default: Any = None
    network: str = ""  # its key in the network's file
    fixed: bool = False  # there: an operator may not give another value

    @property
    def help(self) -> str:
        return " ".join((self.field.description or "").split())

    @cached_property
    def parts(self) -> list[Any]:
        """The parts of the type, and the constraints upon it."""
        return [*_parts(self.field.annotation), *self.field.metadata]

    @property
    def secret(self) -> bool:
        return SecretStr in self.parts

    @property
    def optional(self) -> bool:
        return NoneType in self.parts

    @property
    def many(self) -> bool:
        """True if the flag takes several words."""
        return Ellipsis in self.parts

    @property
    def choices(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def bounds(self) -> str:
        """``1 to 100``; empty for what is no number."""
        low = [show(part.ge) for part in self.parts if isinstance(part, Ge)]
        high = [show(part.le) for part in self.parts if isinstance(part, Le)]
        return f"{low[0]} to {high[0]}" if low and high else ""

    @property
    def wanted(self) -> str:
        """The kind of value of this flag: ``a whole number``."""
        words = ", ".join(self.choices)
        if words and not self.bounds:
            return f"one of {words}"
        return f"{self._type[0]} or {words}" if words else self._type[0]

    @property
    def metavar(self) -> str:
        """The word that stands for the value in the help."""
        if self.many:
            return "WORD"
        first = [self._type[1]] if self.bounds or not self.choices else []
        return "|".join(first + self.choices)

    @property
    def _type(self) -> tuple[str, str]:
        return next((_TYPES[part] for part in self.parts if part in _TYPES), _TYPES[str])


def _parts(hint: Any) -> Iterator[Any]:
    """Flatten ``int | Literal["auto"]`` to Union, int, Literal, "auto"; constraints as they are."""
    yield typing.get_origin(hint) or hint
    for part in typing.get_args(hint):
        yield from part.metadata if isinstance(part, FieldInfo) else _parts(part)


class Schema:
    """The settings one kind of neuron understands, found by any spelling of their flags."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.classes: dict[str, Any] = typing.get_type_hints(AllSettings)
        self.settings: dict[str, Setting] = {}
        for package, settings_class in self.classes.items():
            if package != "validator" or kind == "validator":
                defaults = settings_class()
                for field_name in settings_class.__pydantic_fields__:
                    field = _declared(settings_class, field_name)
                    if field.json_schema_extra:  # else it has no flag: tests alone give it
                        self._add(package, field_name, field, getattr(defaults, field_name))
        order = list(TITLES)
        grouped = sorted(self.settings.items(), key=lambda item: order.index(item[1].group))
        self.settings = dict(grouped)
        self._spellings = {canonical(setting.name): setting for setting in self}

    def _add(self, package: str, field_name: str, field: FieldInfo, default: Any) -> None:
        declared: dict[str, Any] = field.json_schema_extra  # type: ignore[assignment]
        name, places, group = declared["name"], [(package, field_name)], package
        fixed = bool(declared["network"] and declared["fixed"])
        if fixed or name in USUAL:
            group = "network" if fixed else "usual"
        known = self.settings.get(name)
        if known is not None:
            places, group = [*known.places, *places], known.group
            # Or what --help shows would be true of one of the two packages only.
            if known.default != default:
                raise TypeError(f"--{name} has two defaults: {known.default!r}, {default!r}")
        self.settings[name] = Setting(
            name=name,
            env=declared["env"],
            group=group,
            field=field,
            places=tuple(places),
            default=default,
            network=declared["network"],
            fixed=fixed,
        )

    def find(self, name: str) -> Setting:
        """Find the setting of a flag, dashes or underscores alike.

        Raises ConfigError if unknown.
        """
        setting = self._spellings.get(canonical(name))
        if setting is None:
            nearest = self._nearest(canonical(name))
            hint = f"did you mean --{nearest}?" if nearest else "see --help"
            raise ConfigError(f"--{name} is not a known flag, so nothing was started: {hint}")
        return setting

    def get(self, name: str) -> Setting | None:
        """Return the setting of a flag; None if unknown."""
        return self._spellings.get(canonical(name))

    def _nearest(self, name: str) -> str | None:
        """Return the flag that a slip of the finger made into ``name``, if one is that near."""
        section = [spelling for spelling in self._spellings if spelling.startswith(f"{name}.")]
        if section:
            return self._spellings[section[0]].name
        tails = {spelling.rpartition(".")[2]: s for spelling, s in self._spellings.items()}
        last = name.rpartition(".")[2]
        longer = [tail for tail in tails if len(last) > 3 and tail.startswith(last)]
        if last in tails or longer:
            return tails[last if last in tails else longer[0]].name
        close = difflib.get_close_matches(name, self._spellings, n=1, cutoff=0.8)
        if close:
            return self._spellings[close[0]].name
        close = difflib.get_close_matches(last, tails, n=1, cutoff=0.75)
        return tails[close[0]].name if close else None

    def __iter__(self) -> Iterator[Setting]:
        """Yield the settings grouped, in the order of the help."""
        return iter(self.settings.values())


def _declared(settings_class: Any, name: str) -> FieldInfo:
    """Return a field as the class that declares it has it: no other has its help."""
    classes = [c.__pydantic_fields__ for c in settings_class.__mro__[-2::-1]]  # but object
    return next(fields[name] for fields in classes if name in fields)


def canonical(name: str) -> str:
    """Return one spelling for all: dashes are underscores, case does not count."""
    return name.replace("-", "_").lower()


@lru_cache
def schema(kind: Kind) -> Schema:
    return Schema(kind)


# --- retired flags ------------------------------------------------------------------------------


class Given(NamedTuple):
    """The text for one setting in one place."""

    text: str  # several words are separated by spaces
    source: str  # as an operator calls the place: --neuron.upload_steps, R2_ACCOUNT_ID


_NO_INFLUX = "this miner does not send anything to InfluxDB"
_NO_QUANTIZATION = "gradients travel as float32 values and int16 indices; nothing is quantized"

#: Flags that nobody needed; their values are constants.
_CONSTANTS = """
axon.clock_skew axon.legacy_timeout_cap axon.read_timeout axon.requests_per_hotkey
chain.neurons_interval chain.poll_interval
chain.write_timeout clamp.allreduce_timeout clamp.min_group_size clamp.min_matchmaking_time
clamp.next_chunk_timeout clamp.request_timeout clamp.timeout data.page_deadline
data.request_attempts data.request_timeout data.table_age dht.start_timeout
diagnostics.expected_step_max diagnostics.expected_step_min diagnostics.low_gpu_memory_gb
neuron.fsdp_wrap neuron.gradient_sync neuron.keep_unsharded neuron.nan_limit neuron.nan_slow_steps
neuron.snapshot_timeout profile.start r2.checksum_mode r2.connect_timeout r2.part_size
r2.write_interval validator.alive_timeout validator.evaluation_ranks validator.held_out_sequences
validator.publication_budget validator.seed validator.sweep_patience validator.tick
validator.top_candidates
"""

#: Flag -> why it has no effect.
NO_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(_CONSTANTS.split(), "its value is fixed"),
    "axon.max_workers": "the signed server answers on one event loop; see --axon.max_connections",
    "neuron.dont_wandb_log": "Weights & Biases gets nothing unless --neuron.wandb asks for it",
    "neuron.global_batch_size_train": (
        "no peer reads it; the batch of a step is --neuron.local_batch_size_train_effective"
    ),
    "neuron.influxdb_bucket": _NO_INFLUX,
    "neuron.influxdb_org": _NO_INFLUX,
    "neuron.influxdb_token": _NO_INFLUX,
    "neuron.influxdb_url": _NO_INFLUX,
    "neuron.loss_kernel": "the built-in chunked cross-entropy is the only one",
    "neuron.quantization_bins": _NO_QUANTIZATION,
    "neuron.quantization_range": _NO_QUANTIZATION,
    "neuron.score_preview": "python scripts/score.py tells what a validator would score",
    "no_prompt": "this miner never asks questions",
    "strict": "unknown flags are always errors",
}
SECRETS = frozenset({"neuron.influxdb_token"})

#: Old name of a flag -> its name.
RENAMED: Mapping[str, str] = {
    "chain.local_url": "chain.registry_url",
    "neuron.nproc_per_node": "nproc_per_node",
    "show_all_rank_logs": "neuron.show_all_rank_logs",
    "validator.initial_seed": "neuron.seed",
    "validator.upload_age_limit": "neuron.repo_age_limit",
}

#: Flag -> what to do; refused unless its value is false.
REFUSED: Mapping[str, str] = {
    "neuron.shard_across_nodes": (
        "each node holds a copy of the model, so leave the flag out, and where the model does not "
        "fit one node's GPUs give --neuron.activation_checkpointing full or use larger GPUs"
    ),
}

#: Flag -> old value -> the value that took its place.
OLD_VALUES: Mapping[str, Mapping[str, str]] = {"neuron.error_feedback": {"round": "best"}}

FLAGS = frozenset({*NO_EFFECT, *REFUSED, *RENAMED})


def settle(given: Mapping[str, Given]) -> tuple[dict[str, Given], tuple[str, ...]]:
    """Return what is left for the settings, and a line for each thing that was settled here.

    Raises ConfigError for a flag whose function is gone and was relied on.
    """
    left: dict[str, Given] = {}
    lines = []
    for name, entry in given.items():
        text = entry.text.strip()
        if name in NO_EFFECT:
            lines.append(f"{entry.source} has no effect: {NO_EFFECT[name]}")
        elif name in REFUSED:
            if text.lower() not in ("false", "0", "no", "off"):
                raise ConfigError(
                    f"{entry.source} is not offered any more, so nothing was started: "
                    f"{REFUSED[name]}"
                )
            lines.append(f"{entry.source} has no effect: its function is not offered any more")
        elif name in RENAMED:
            lines.append(f"{entry.source} is an older name of --{RENAMED[name]}")
            # Where both names are given the new one counts.
            left.setdefault(RENAMED[name], entry)
        elif text in OLD_VALUES.get(name, ()):
            new = OLD_VALUES[name][text]
            lines.append(f"{entry.source} {text} is an older name of {new}, which takes its place")
            left[name] = Given(new, entry.source)
        else:
            left[name] = entry
    return left, tuple(lines)


# --- what people read ---------------------------------------------------------------------------

PUBLIC_DOCUMENT = "docs/flags.md"
SETTINGS_FILE = "config.txt"  # in the run folder
WARNING = "  warning: "  # how the line of a warning begins


def describe(config: Config) -> list[str]:
    """Return the settings that were given, one a line, secrets masked, with where each came from.

    They begin the log of every start; all settings are in :data:`SETTINGS_FILE`.
    """
    preset, place = f"preset {config.preset}", config.general.network
    # What a preset or the network's file gave was not given by this operator.
    given = [
        s
        for s in schema(config.kind)
        if config.sources.get(s.name, preset) not in (preset, f"{s.network} in {place}")
    ]
    lines = [f"This is {config.network.line}"] if config.network else []
    lines += [
        f"Configuration of this {config.kind} ({preset}): {len(given)} settings are given; "
        f"all of them: {SETTINGS_FILE} in the run folder"
    ]
    lines += [_entry(config, setting) for setting in given]
    return lines + [f"{WARNING}{line}" for line in config.warnings]


def all_settings(config: Config) -> str:
    """Return every setting, by subject, as :data:`SETTINGS_FILE` holds them."""
    lines = [f"All settings of this {config.kind} (preset {config.preset}), as it last started."]
    for group, settings in groupby(schema(config.kind), key=lambda setting: setting.group):
        lines += ["", TITLES[group], *(_entry(config, setting) for setting in settings)]
    return "\n".join(lines) + "\n"


def _entry(config: Config, setting: Setting) -> str:
    source = config.sources.get(setting.name, "")
    # The setting is None by default: the folder is made of two others.
    value = config.run_folder if setting.name == "neuron.run_folder" else config.get(setting.name)
    label = str(setting.env) if setting.secret else f"--{setting.name}"
    on_argv = source == f"--{setting.name}"
    origin = f"   ({'command line' if on_argv else source})" if source else ""
    return f"  {label:<46} {show(value) or '-'}{origin}"


def markdown() -> str:
    """Write ``docs/flags.md``. The validator's schema holds the miner's, so it is documented."""
    lines = [
        "# Flags",
        "",
        "Written by `python -m distributed_training flags`; do not edit.",
        "",
        "Dashes and underscores in a flag are the same: `--neuron.upload-steps 60` and",
        "`--neuron.upload_steps=60`. Switches need no value; `--flag false` turns one off. What",
        "wins, strongest first: flags, environment variables, `.env` (with or without `export`),",
        "`miner.toml` beside it (or the TOML file of `--config`), the network's file, the preset,",
        "the default. Secrets come from the environment or `.env` only and are refused on the",
        "command line. Unknown flags are errors, and so are values outside the range. Without",
        "`--network` the network is the public one.",
    ]
    for group, settings in groupby(schema("validator"), key=lambda setting: setting.group):
        lines += ["", f"## {TITLES[group]}", ""]
        if group == "network":
            lines += [
                "All peers must agree on these, so [the network's file](network-file.md) sets",
                "them. Beside `--network` a flag with another value is refused.",
                "",
            ]
        if group == "validator":
            lines += ["Understood by `neurons/validator.py` only.", ""]
        lines += ["| Flag | Default | Range | Environment | Meaning |", "| --- " * 5 + "|"]
        lines += [_row(setting) for setting in settings]
    lines += ["", "## Accepted, without effect", ""]
    lines += ["A start script may still have them; one line says so at each start.", ""]
    lines += ["| Flag | Why |", "| --- | --- |"]
    lines += [f"| `--{name}` | {why} |" for name, why in sorted(NO_EFFECT.items())]
    lines += ["", "## Presets", ""]
    for preset, values in PRESETS.items():
        if not values:
            lines += [f"`--preset {preset}`: the network's file as it is.", ""]
            continue
        lines += [f"`--preset {preset}`:", ""]
        lines += [f"- `--{name} {value}`" for name, value in values.items()] + [""]
    return "\n".join(lines).rstrip() + "\n"


def _row(setting: Setting) -> str:
    name = "(environment only)" if setting.secret else f"`--{setting.name}`"
    default = "" if setting.default in (None, "", ()) else f"`{show(setting.default)}`"
    variable = f"`{setting.env}`" if setting.env else ""
    meaning = setting.help
    if setting.choices:
        meaning += f" ({', '.join(setting.choices)})"
    if setting.network:
        meaning += f" (in the file: `{setting.network}`)"
    cells = (name, default, setting.bounds, variable, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
