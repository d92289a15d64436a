//! Rows of numbers.

/// A matrix in row-major order.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    data: Vec<f32>,
}

impl Matrix {
    /// A matrix of these values.
    ///
    /// # Panics
    ///
    /// If there are not `rows * cols` values.
    pub fn new(rows: usize, cols: usize, data: Vec<f32>) -> Self {
        assert_eq!(
            data.len(),
            rows * cols,
            "values of a {rows} x {cols} matrix"
        );
        Self { rows, cols, data }
    }

    pub(crate) fn zeros(rows: usize, cols: usize) -> Self {
        Self::new(rows, cols, vec![0.0; rows * cols])
    }

    /// Number of rows: examples of a batch.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns: features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// All values.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// All values, writable.
    pub fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.cols..][..self.cols]
    }

    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.cols..][..self.cols]
    }

    /// `self * other^T` for a matrix of `other_rows` rows.
    pub(crate) fn times_transposed(&self, other: &[f32], other_rows: usize) -> Matrix {
        let mut out = Matrix::zeros(self.rows, other_rows);
        for i in 0..self.rows {
            for j in 0..other_rows {
                let row = &other[j * self.cols..][..self.cols];
                let dot = self.row(i).iter().zip(row).map(|(a, b)| a * b).sum();
                out.row_mut(i)[j] = dot;
            }
        }
        out
    }

    /// `self * other` for a matrix of `cols` columns.
    pub(crate) fn times(&self, other: &[f32], cols: usize) -> Matrix {
        let mut out = Matrix::zeros(self.rows, cols);
        for i in 0..self.rows {
            for (k, &value) in self.row(i).iter().enumerate() {
                let row = &other[k * cols..][..cols];
                let out = out.data[i * cols..][..cols].iter_mut();
                out.zip(row).for_each(|(out, other)| *out += value * other);
            }
        }
        out
    }

    /// `self^T * other`.
    pub(crate) fn transposed_times(&self, other: &Matrix) -> Vec<f32> {
        let mut out = vec![0.0; self.cols * other.cols];
        for i in 0..self.rows {
            for (k, &value) in self.row(i).iter().enumerate() {
                let out = out[k * other.cols..][..other.cols].iter_mut();
                out.zip(other.row(i))
                    .for_each(|(out, other)| *out += value * other);
            }
        }
        out
    }

    /// The sum of each column.
    pub(crate) fn column_sums(&self) -> Vec<f32> {
        let mut sums = vec![0.0; self.cols];
        for i in 0..self.rows {
            sums.iter_mut()
                .zip(self.row(i))
                .for_each(|(sum, value)| *sum += value);
        }
        sums
    }
}
