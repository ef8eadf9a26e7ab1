"""What one rank reads, and where it keeps it. Picklable: a worker gets it over its socket."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from distributed_training.config.data import DataSettings

from .tokenizer import tokenizer_hash


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker needs; picklable. ``folder`` takes prepared blocks and the cache.

    ``vocabulary``: the model's; rows with ids beyond it are left out. None: not checked.
    """

    settings: DataSettings
    uid: int
    rank: int
    world_size: int
    sequence_length: int
    tokenizer_path: Path
    eos_id: int
    folder: Path
    vocabulary: int | None = None

    @property
    def blocks(self) -> Path:
        """Where this rank's prepared blocks are. What changes their content changes the name."""
        settings = self.settings
        mixed = [(s.name, s.text, s.weight) for s in settings.sources]
        facts = [
            mixed, settings.dataset, settings.text_column, settings.pages_per_block,
            settings.rows_per_page, settings.max_length, self.uid, self.rank, self.world_size,
            self.sequence_length, self.eos_id, self.vocabulary,
            tokenizer_hash(self.tokenizer_path),
        ]  # fmt: skip
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        return self.folder / "blocks" / f"rank{self.rank}-{name}"

    @property
    def cache(self) -> Path:
        return self.settings.cache_dir or self.folder / "pages"
