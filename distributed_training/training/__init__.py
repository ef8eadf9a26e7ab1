"""Model, FSDP2, inner step, outer step, snapshot, checkpoint, throughput. Needs torch only."""
