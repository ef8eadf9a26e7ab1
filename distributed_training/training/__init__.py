"""Model, FSDP2, inner step, outer step, copies, checkpoint, throughput. Needs torch only."""
