"""Score an upload as a validator does, by one implementation for validator and score preview.

``upload`` (bucket, block list, text and content, checked), ``evaluator`` (the loss before and after
it), ``causes`` (why a score is zero, and what fixes it). The preview of ``scripts/score.py``:
``score_preview`` and ``command`` (table and JSON). Nothing is imported here.
"""
