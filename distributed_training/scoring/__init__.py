"""Score an upload as a validator does, by one implementation for validator and score preview.

``upload`` (bucket, block list, text and content, checked; why a score is zero, and what fixes it),
``evaluator`` (the loss before and after it). The preview of ``scripts/score.py``:
``score_preview`` and ``command`` (lines and JSON). Nothing is imported here.
"""
