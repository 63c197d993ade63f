"""Look at directories before state is put there, and at what live processes hold in them."""
