"""What a validator makes of an upload, computed by one implementation for validator and preview.

``upload`` (bucket, block list, text and content, checked), ``evaluator`` (the loss before and after
it), ``causes`` (why a score is zero, and what fixes it). The preview of ``scripts/score.py``:
``command``, ``score_preview`` and ``report`` (table and JSON). Nothing is imported here.
"""
