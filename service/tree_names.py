"""Names of files by which the parts of an installation find each other. Standard library only: the installer reads
them.
"""

FILE_NAME = "onedesk.toml"
# In a checkout that stands in custom_nodes itself: the link to the tree that was made for it.
TREE_LINK = ".tree"
# The language model of the demo, by its name under models/.
DEMO_WRITER = "onedesk-demo-writer"
