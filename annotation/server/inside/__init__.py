"""What runs inside the server's environment, where nothing of ours but this folder can be imported."""
