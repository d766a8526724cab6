"""Two nodes on one machine: what crosses the link between them in a step, and a rank that dies.

    python tests/tools/two_nodes --save

For Linux, as root, with iproute2; it takes 2 minutes. `hosts` makes two hosts out of network
namespaces, `link_bytes` trains on them by each strategy and puts the bytes on the link beside the
prediction, `restart` kills a rank of chapter 12's training script there. The bytes are kept in
chapters/data/two_nodes.json.
"""
