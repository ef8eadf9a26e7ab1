"""The swarm of format 1: peers that find each other through a DHT and average pseudo-gradients.

A round is :meth:`HivemindSwarm.average` (:mod:`.swarm`): find a group, average the values with it
(:mod:`.all_reduce`, on hivemind's wire, :mod:`.wire`), check the average. hivemind's network
daemon, DHT node and averager run in a *swarm process* (:mod:`.averager_process`). A process that
hangs or dies there is killed and started again (:mod:`.supervisor`) while training continues.
Commands and tensors cross between rank 0 and that process as :mod:`.supervisor` describes.
"""
