"""What is around the program: terminals, servers, hubs, browsers, processes, hostile input."""
