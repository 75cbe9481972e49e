"""The clients of stores: file systems of fsspec, and obstore, a client in Rust."""
