"""What a validator makes of an upload, computed by one implementation for validator and preview.

``repository`` (is the bucket valid), ``upload`` (what it holds, checked), ``pages`` (the text it is
judged on), ``model`` and ``evaluator`` (the loss before and after it), ``causes`` (why a score is
zero, and what mends it).

The preview of ``scripts/score.py``: ``session`` (where it looks), ``judged`` (the global state),
``folder`` (a folder in place of a bucket), ``preview`` (one look), ``ranking`` (where it leads),
``report`` (table and JSON), ``background`` (beside a miner). Nothing is imported here.
"""
