"""What a validator makes of an upload, computed by one implementation for validator and preview.

``repository`` (is the bucket valid), ``upload`` (what it holds, checked), ``pages`` (the text it is
judged on), ``model`` and ``evaluator`` (the loss before and after it), ``causes`` (why a score is
zero, and what mends it). Nothing is imported here.
"""
