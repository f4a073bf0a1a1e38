"""What bounds an examination: its time, and what a bundle has too little for. No cause is found."""
