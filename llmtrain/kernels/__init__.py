"""One op a file: reference, fast kernel, autograd function and the choice between them."""
