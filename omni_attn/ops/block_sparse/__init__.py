"""Block-sparse attention in four parts: partition -> means -> selector -> executor.

partition       which tokens form a block (video tiles, or any other cut of a sequence)
means           one vector per block, and the coarse attention between them
selectors       which key blocks a query block attends to
executor        the contract of what computes it; torch_executor and triton_executor are ours
"""
