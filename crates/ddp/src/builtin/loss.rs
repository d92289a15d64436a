//! The loss.

use super::matrix::Matrix;

/// Softmax cross entropy, averaged over the batch: the loss and its gradient.
///
/// # Panics
///
/// If there is not one target per row, or one is no class.
pub fn cross_entropy(logits: &Matrix, targets: &[usize]) -> (f32, Matrix) {
    assert_eq!(logits.rows(), targets.len(), "one target per row");
    let share = 1.0 / targets.len() as f32;
    let mut grad = logits.clone();
    let mut loss = 0.0;
    for (i, &target) in targets.iter().enumerate() {
        let row = grad.row_mut(i);
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = row.iter().map(|value| (value - most).exp()).sum();
        loss -= (row[target] - most - sum.ln()) * share;
        row.iter_mut()
            .for_each(|value| *value = (*value - most).exp() / sum * share);
        row[target] -= share;
    }
    (loss, grad)
}
