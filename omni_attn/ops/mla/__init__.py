"""Multi-head latent attention: kernels over a paged cache of latents, and over what is made of them.

A token is kept as one row [latent | rope], which all heads share. Absorbed queries attend to the rows themselves, and
what comes out is a latent for each head; in the other form keys and values of each head are made of the latents first.

Legend of the files here: R requests, T query tokens of all requests, S keys of all requests, H heads, C channels of the
latent, E of the rope part, K of a key's part without positions, V of a value, N pages, P tokens of a page. One layer's
cache is [N, P, C + E].
"""
