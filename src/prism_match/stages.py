from contextlib import nullcontext
def stage(name): return nullcontext()
