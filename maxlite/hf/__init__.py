"""Hugging Face folders: their tensors and config.json to ours and back, by one table a family, without torch.

A `Table` of `Rule`s says which tensor of the files is which of our parameters and in what layout; `plan_tensors`
works it out for one model; reading and writing both follow that plan, a few megabytes at a time.
"""
