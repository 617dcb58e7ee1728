"""``fastplm study``: a declared grid of trainings and evaluations, to one table with intervals.

study    reads the grid, plans, runs and writes; or shows what would run
grid     the file: variants, evaluations, claims
cells    each training and evaluation is a cell, under a key (keys) and with a cost (costs);
         what depends on held-out figures (held_out) is planned when they are there
engine   Snakemake runs cells; cell runs one of them, and writes its figures
results  the scores of each variant, with intervals (statistics); claims compares them
table    the files and the page; picture
"""
