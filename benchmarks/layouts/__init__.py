"""What does a replica of several ranks hold and send, by how its ranks hold the model?

Three parts of one page: `memory` (what a rank holds, counted, and the peaks of its resident
memory), `link` (step time and bytes over a slow link between replicas), `large` (the largest Llama
of which two replicas of two ranks fit on this machine). Each has what its ranks run (`held`,
`linked`, `trained`, all called by `job`) and what starts them and tells of it (`memory`, `link`,
`large`). `ranks` starts processes and ends them before they take more memory than there is.
"""
