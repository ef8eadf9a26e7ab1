"""What the validator writes to ``events.jsonl``, one JSON object a line, for whoever follows it.

Every line carries ``kind`` and ``time`` (seconds since the epoch, written by the event log). Fields
of each kind, in the order in which they happen; readers ignore kinds and fields they do not know:

``start``
    uid, hotkey, peer_id (the averager's), maddrs (where its DHT is reached: others' initial peers),
    outer_step, resumed (False: the initial model was new).
``publication``
    revision (tag ``run.outer_step.0``), ok, seconds, bytes_sent, reason (empty when ok).
``held_out``
    outer_step, before, after: mean loss in nats per token on held-out text. Once at start with
    before == after (the state the run begins from), then for each outer step *before* its
    ``outer_step`` event; outer_step is the one reached by it. A step that was refused for its loss
    has the event too, and no ``outer_step`` event follows: for one outer_step the last counts.
``inner_optimizer``
    outer_step (of the files that newcomers take over), uid (whose moments they are), finished_steps
    (the place in the learning rate's schedule), seconds.
``upload_seen``
    uid, revision (tag in the miner's root metadata), outer_step (folder looked at), age_seconds.
    Once for each new revision.
``upload_scored``
    uid, outer_step (folder that was judged), revision, ok; if it was reset, cause (name of a
    ``Cause`` of ``scoring``) and reason (the same in words, with its figures), else both empty;
    random_before, random_after, random_relative, assigned_before, assigned_after,
    assigned_relative, assigned_block, random_block. Losses in nats; absent when ok is False.
``scores``
    outer_step, block, scores: {uid as text: {random (mu - 3 sigma), mu, sigma, assigned, train,
    all_reduce, repo_valid, total, published (EMA of total: the weight set on the chain)}}.
``sweep``
    outer_step, block, alive (uids), not_alive (uids). One IsAlive sweep.
``round``
    outer_step (the one the round was meant to end), ok, fault (name of an ``AllReduceFault``, or
    ``WORSE`` when the loss check refused the step, or empty), detail, peers (peer ids of the group,
    ours included), failed_peers, called (uids), participants (uids of miners in the group),
    top_uid (whose checkpoint gave the validator's pseudo-gradient, or null), seconds,
    matchmaking_seconds, transfer_seconds.
``outer_step``
    outer_step (reached; the new global state is published and complete), participants (uids),
    seconds (from the call to the end of the publication).
``weights``
    block, weights: {uid as text: weight}.
``stop``
    reason.
"""

from __future__ import annotations
