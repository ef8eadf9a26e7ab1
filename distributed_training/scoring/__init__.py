"""Measure an upload as the validator does, and read what the validator has signed.

``evaluator`` measures the loss before and after an upload, on the text that the upload is judged
on. ``command`` and ``verdicts`` are ``dt-score``, and ``export`` is ``dt-export``. Nothing is
imported here.
"""
