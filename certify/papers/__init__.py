"""Figures and bounds as the papers state them, for comparison: nothing here enters a certificate.

Papers are referred to by the numbers used throughout the project.

    000   Hu et al., SpecFormer: Guarding Vision Transformer Robustness via Maximum Singular Value Penalization
    001   Wang and Ruan, Understanding Adversarial Robustness of Vision Transformers via Cauchy Problem (CoViT)
    003   Gupta and Verma, CertViT: Certified Robustness of Pre-Trained Vision Transformers
    004   Havens et al., Fine-grained Local Sensitivity Analysis of Standard Dot-Product Self-Attention (LoFAST)
"""
