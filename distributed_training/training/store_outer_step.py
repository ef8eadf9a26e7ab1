"""Take the outer step of a store network: write what was trained, apply the update that all apply.

In such a network the validator alone merges. A miner writes one upload at each close: what it has
trained since the epoch-start weights, and what encoding earlier ones has lost (its *residual*).
Later it applies one published update to the epoch-start weights. All miners apply the same bytes,
so their epoch starts are equal to the bit. What was trained beside the exchange stays on top:
:class:`~distributed_training.protocol.types.Base` says from where it counts.

Order that makes it safe: write the upload, then a checkpoint, which keeps the weights that it was
written from, and only when that is complete send it. So no restart finds an upload in the store
that its checkpoint does not know. The file of an upload stays on the disk until a checkpoint of a
later outer step is complete: a restart, or a roll-back, may apply the same update once more.
"""

from __future__ import annotations

from .outer_step import OuterStep
from .snapshot import SnapshotHandle


class UploadHandle(SnapshotHandle):
    """The writing of one upload by this rank. Rank 0 signs it; then it is at ``path``, whole."""

    digest: str = ""  # rank 0, once done: SHA-256 of the file, hex


class StoreOuterStep(OuterStep):
    """Owns epoch-start weights and residual of one rank, and what its upload was written from."""

    serial: int | None = None  # of the close that an upload of this outer step was written for
    dropped: str = ""  # what the last commit dropped, one line; empty: nothing
