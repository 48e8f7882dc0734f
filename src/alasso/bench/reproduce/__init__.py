"""The paper, reproduced: experiments and claims as files, what is missing run, every claim with a verdict."""
