"""Deduplication: exact and near duplicates, and text of evaluation sets.

Every step is a plain function from paths to paths and counts, so that it can run as one task anywhere; steps that need
all documents at once are shuffles through files, one partition per task. ``stage.py`` runs them in order.
"""
