"""The pages that a person looks at in a browser. Door: `pages.Pages`.

The files lie in the package's `assets/page/` as they are sent. A page never holds data of the
server: what it shows it asks of the same routes as any client, with the key that a person types.
"""
