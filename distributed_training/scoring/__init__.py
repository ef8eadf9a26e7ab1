"""Measure an upload as the validator does, and read what it has signed.

``upload`` (an upload, and the text that it is judged on), ``evaluator`` (the loss before and after
it), ``command`` and ``verdicts`` (``dt-score``), ``export`` (``dt-export``). Nothing is imported
here.
"""
