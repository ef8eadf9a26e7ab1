"""Optional functions: promised to operators, of no use for a score, outside of the core.

Tokenizing ahead and its shards (``pretokenize``, ``shard_source``), several sources at once
(``mixture``), and local text (``line_files``). They build on the core. The core loads a module of
this package only when a flag asks for it, by
:func:`distributed_training.config.types.load_optional`.
"""
