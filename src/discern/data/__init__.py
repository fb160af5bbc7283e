"""From text to batches, in the order of the subpackages:

`sources` reads inputs and cuts them into documents, `tokenizer` turns documents into ids, `dataset` keeps the ids on disk, and
`batching` packs them into rows and gives the deterministic stream of batches. `prepare` goes from text to a data set.
"""
